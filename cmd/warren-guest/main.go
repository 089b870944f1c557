// Warren-guest is process 1 of every sandbox. Package guest says what it does.
package main

import (
	"os"

	"github.com/warren-sandbox/warren/internal/guest"
)

func main() {
	os.Exit(guest.Main(os.Args, os.Environ(), os.Stderr))
}
