//go:build linux

package keeper

import (
	"os"

	"github.com/warren-sandbox/warren/driver/internal/idmap"
)

// idMap says which ids on disk become which ids of the host, for an idmapped mount.
type idMap = idmap.Map

// diskMap maps the whole range of a sandbox.
func diskMap(base, host uint32) idMap { return idmap.Range(base, host) }

// userMap makes one user of the host the user inside. The root inside maps to an id of nobody's: gVisor makes each file
// as root before it gives it to the user, and what root itself makes there shall not belong to a user of the host.
func userMap(uid, gid, host uint32) idMap {
	return idmap.User(uid, gid, diskIDBase, host, sandboxUser)
}

// userNamespaces holds a user namespace per mapping. They are kept because ranges are used again.
type userNamespaces struct{ idmap.Namespaces }

// maxUserNamespaces bounds them; beyond it the namespaces of the moment are made and closed.
const maxUserNamespaces = 512

// get returns the namespace of a mapping and a function to call when it is no longer needed.
func (u *userNamespaces) get(m idMap) (*os.File, func(), error) { return u.Get(m, maxUserNamespaces) }
