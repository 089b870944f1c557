// Package repocheck holds tests of the repository itself: which package may import which and why, that what is
// exported is documented, that tests skip in one place, and that no file holds what it should not.
package repocheck
