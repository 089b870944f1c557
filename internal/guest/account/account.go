// Package account knows the users of the sandbox and runs file operations with a user's rights.
//
// It reads /etc/passwd and /etc/group itself: the guest is a static binary without a C library, and package os/user
// would bring more than it needs. Both files are the sandbox's own and may hold anything.
package account

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// User is an account of the sandbox.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// ErrUnknown says that there is no such user.
var ErrUnknown = errors.New("no such user")

// maxFile bounds how much of /etc/passwd and /etc/group is read.
const maxFile = 4 << 20

// Database is the users and groups of a sandbox.
type Database struct {
	// Passwd and Group are the paths of the two files.
	Passwd, Group string

	mu     sync.Mutex
	users  cached[[]User]
	groups cached[[]group]
}

// System is the database of the running system.
var System = &Database{Passwd: "/etc/passwd", Group: "/etc/group"}

// The users that exist in every sandbox, whatever its image says.
var builtin = []User{
	{Name: "root", UID: 0, GID: 0, Home: "/root", Shell: "/bin/sh"},
	{Name: "user", UID: 1000, GID: 1000, Home: "/home/user", Shell: "/bin/bash"},
}

type group struct {
	name    string
	gid     uint32
	members []string
}

// cached is what a file held when it was last looked at.
type cached[T any] struct {
	value T
	size  int64
	mtime time.Time
	read  bool
}

// load returns the parsed file, reading it again only after it has changed.
func (c *cached[T]) load(path string, parse func(string) T) T {
	st, err := os.Stat(path)
	if err != nil {
		var zero T
		c.read = false
		return zero
	}
	if !c.read || st.Size() != c.size || !st.ModTime().Equal(c.mtime) {
		c.value, c.size, c.mtime, c.read = parse(readFile(path)), st.Size(), st.ModTime(), true
	}
	return c.value
}

func readFile(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, maxFile)) // what can be read counts
	return string(data)
}

// Lookup returns the user of that name, or else of that number. An error matches [ErrUnknown].
func (d *Database) Lookup(name string) (*User, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lists := [][]User{d.users.load(d.Passwd, parsePasswd), builtin}
	find := func(is func(*User) bool) *User {
		for _, list := range lists {
			for i := range list {
				if is(&list[i]) {
					u := list[i]
					u.Groups = d.groupsOf(&u)
					return &u
				}
			}
		}
		return nil
	}
	if u := find(func(u *User) bool { return u.Name == name }); u != nil {
		return u, nil
	}
	if uid, err := strconv.ParseUint(name, 10, 32); err == nil {
		if u := find(func(u *User) bool { return u.UID == uint32(uid) }); u != nil {
			return u, nil
		}
	}
	return nil, fmt.Errorf("%w: %.64q", ErrUnknown, name)
}

// groupsOf returns the user's groups, the primary one first.
func (d *Database) groupsOf(u *User) []uint32 {
	ids := []uint32{u.GID}
	for _, g := range d.groups.load(d.Group, parseGroup) {
		for _, m := range g.members {
			if m == u.Name && g.gid != u.GID && len(ids) < maxGroups {
				ids = append(ids, g.gid)
			}
		}
	}
	return ids
}

// maxGroups is the kernel's own limit, NGROUPS_MAX, kept lower: nobody is in a thousand groups.
const maxGroups = 1024

// ByUID returns the user with that number; it is false when there is none.
func (d *Database) ByUID(uid uint32) (string, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, list := range [][]User{d.users.load(d.Passwd, parsePasswd), builtin} {
		for i := range list {
			if list[i].UID == uid {
				return list[i].Name, true
			}
		}
	}
	return "", false
}

// UserName returns the name of a uid, or the number where it has none.
func (d *Database) UserName(uid uint32) string {
	if name, ok := d.ByUID(uid); ok {
		return name
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName returns the name of a gid, or the number where it has none.
func (d *Database) GroupName(gid uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.groups.load(d.Group, parseGroup) {
		if g.gid == gid {
			return g.name
		}
	}
	for _, u := range builtin {
		if u.GID == gid {
			return u.Name
		}
	}
	return strconv.FormatUint(uint64(gid), 10)
}

// parsePasswd reads the lines it understands and passes over the others.
func parsePasswd(data string) []User {
	var users []User
	for line := range strings.Lines(data) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) < 7 || f[0] == "" || strings.HasPrefix(f[0], "#") {
			continue
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil || uid == noID || gid == noID {
			continue
		}
		u := User{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5], Shell: f[6]}
		if !strings.HasPrefix(u.Home, "/") {
			u.Home = "/"
		}
		if u.Shell == "" {
			u.Shell = "/bin/sh"
		}
		users = append(users, u)
	}
	return users
}

// noID is the number that set*id calls take as "leave as it is", so it can be nobody's.
const noID = 1<<32 - 1

func parseGroup(data string) []group {
	var groups []group
	for line := range strings.Lines(data) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) < 4 || f[0] == "" || strings.HasPrefix(f[0], "#") {
			continue
		}
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil || gid == noID {
			continue
		}
		g := group{name: f[0], gid: uint32(gid)}
		if f[3] != "" {
			g.members = strings.Split(f[3], ",")
		}
		groups = append(groups, g)
	}
	return groups
}
