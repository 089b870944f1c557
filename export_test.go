package warren

// RunAttempt runs the command of an attempt.
var RunAttempt = (*Attempt).run
