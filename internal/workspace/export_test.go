package workspace

// Unconfine makes git run as the process's own user, so that a test sees what a program that git started wrote.
func (s *Store) Unconfine() { s.unconfined = true }

// RemoveAll is removeAll.
var RemoveAll = removeAll

// ReadAtMost sets how much a mark reads.
func (s *Store) ReadAtMost(n int64) { s.readAtMost = n }
