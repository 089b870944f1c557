//go:build linux

package docker

import (
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/internal/idmap"
)

// ownerMap is the mapping of a mount into a container whose id 0 is the host's id base.
func ownerMap(o driver.Owner, base uint32) idmap.Map {
	if !o.User {
		return idmap.Range(o.IDBase, base)
	}
	return idmap.User(o.UID, o.GID, driver.DiskIDBase, base, driver.SandboxUID)
}

// namespaces are those of this process; they are closed with it. There are few different ones.
var namespaces idmap.Namespaces

// maxUserNamespaces bounds them.
const maxUserNamespaces = 64
