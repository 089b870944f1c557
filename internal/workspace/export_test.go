package workspace

// Unconfine makes git run as the process's own user, so that a test sees what a program that git started wrote.
func (s *Store) Unconfine() { s.unconfined = true }

// RemoveAll is removeAll.
var RemoveAll = removeAll
