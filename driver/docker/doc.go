// Package docker is the driver that runs each sandbox as a container of a Docker engine, with whatever runtime the engine
// offers: runc, runsc, Kata, sysbox.
//
// It speaks the engine's API, from version 1.41 on, over the socket that DOCKER_HOST, the current docker context or the
// usual paths name, or over ssh or TLS; Podman's compatible socket is one of these. What a sandbox looks like from the host:
//
//   - It is a container named warren-<installation>-<id> that carries labels of this installation. Only what bears
//     both is listed, and only that is ever deleted.
//   - Its image was made from the layers of Warren's image store and loaded once; the images whose layers are gone from
//     the store are removed from the engine.
//   - The guest is process 1, from a read-only mount. The channel to it is the standard streams of a second process in the
//     container, which the engine carries: no port is published and no socket is shared.
//   - Its mounts are clones of the very directories that the caller opened, mapped to the container's ids where these
//     differ from those on disk.
//   - It has no network of the engine's. With a card ([driver.CardMaker]) it has one device beside its loopback, whose packets end with whoever
//     serves it; no program inside may change it, or make another.
//   - It has none of the capabilities that a sandbox can do without, no_new_privs, the system
//     call filter of the newest engines with fewer kinds of sockets, and limits of memory, processors, processes and disk.
//
// An engine that does not see this machine's directories, because it runs on another, works on copies: mounts become volumes
// that are filled before a sandbox starts and read back by [Driver.Sync], [Driver.Freeze] and [Driver.Delete], and the guest is
// a part of the image.
//
// An engine that gives less than that is refused, see [Driver.Check]; [Options.Accept] names what may be missing all the
// same. With no_new_privs a set-uid program such as sudo gains nothing inside; commands start as root through the guest.
package docker
