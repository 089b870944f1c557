package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/drivertest/field"
)

// twinResult is what the observer of a twin prints.
type twinResult struct {
	Before, After field.Facts
	Report        field.Report
}

// twin is the broken twin of a sandbox: an environment with no boundary between the attacker and what it attacks. It is
// itself safe. It runs in user, mount, process, network and IPC namespaces of its own, its root is a tmpfs, and what an attack
// would do to a machine it does to plain files that stand in for the kernel's: nothing here is the machine's.
//
// Arguments: the attack and its arguments.
func twin(args []string) error {
	if os.Getpid() != 1 {
		return fmt.Errorf("twin runs only as the first process of its own namespaces")
	}
	if err := twinRoot("/tmp"); err != nil {
		return fmt.Errorf("twin: %w", err)
	}
	planted, err := field.Plant("/host/field", []string{"/host/helper"})
	if err != nil {
		return err
	}
	defer planted.Close()
	planted.Twin = true
	secret := "SECRET=" + planted.Canary
	before, err := planted.Look()
	if err != nil {
		return err
	}
	attack := args
	// What runs beside the attacker where there is no sandbox: a service that holds the secret...
	service := exec.Command("/probe", "wait")
	service.Env = []string{secret}
	if err := service.Start(); err != nil {
		return err
	}
	defer service.Process.Kill()
	// ...and one that opens devices by name.
	done := make(chan struct{})
	if attack[0] == "A08" {
		go naiveOpens(done)
	}
	dir, err := os.Open(filepath.Dir(planted.Read))
	if err != nil {
		return err
	}
	fieldText, err := json.Marshal(planted.Field)
	if err != nil {
		return err
	}
	addKey(planted.Canary)
	cmd := exec.Command("/probe", append([]string{"attack", attack[0], string(fieldText)}, attack[1:]...)...)
	cmd.ExtraFiles = []*os.File{dir} // a descriptor that leaks
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	close(done)
	if err != nil {
		return fmt.Errorf("the attack: %w", err)
	}
	result := twinResult{Before: before}
	if err := json.Unmarshal(out, &result.Report); err != nil {
		return fmt.Errorf("the attack's report: %w", err)
	}
	if result.After, err = planted.Look(); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// twinRoot makes the environment on a directory that every host has, in this mount namespace alone, and changes into it.
func twinRoot(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("twin", dir, "tmpfs", 0, "mode=755,size=256m"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	for _, d := range []string{"proc", "sys/kernel", "sys/fs/cgroup/memory", "dev", "tmp", "etc", "host/field", "workspace", "fake/kernel/random", "fake/vm", "fake/fs/binfmt_misc"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o777); err != nil {
			return err
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	for name, text := range map[string]string{
		"probe": string(self), "host/helper": "a program of the host",
		"fake/kernel/core_pattern": "core", "fake/kernel/modprobe": "/sbin/modprobe", "fake/kernel/hotplug": "", "fake/kernel/sysrq": "1",
		"fake/kernel/hostname": "twin-host-name", "fake/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555", "fake/kernel/osrelease": "9.9.9-twin",
		"fake/vm/overcommit_memory": "0", "fake/sysrq-trigger": "", "fake/fs/binfmt_misc/register": "", "sys/kernel/uevent_helper": "",
		"sys/fs/cgroup/memory/release_agent": "", "sys/fs/cgroup/memory/notify_on_release": "0", "sys/fs/cgroup/memory/devices.allow": "", "sys/fs/cgroup/memory/cgroup.procs": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			return err
		}
	}
	for _, dev := range []string{"null", "zero", "urandom"} {
		path := filepath.Join(dir, "dev", dev)
		if err := os.WriteFile(path, nil, 0o666); err != nil {
			return err
		}
		if err := unix.Mount("/dev/"+dev, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind /dev/%s: %w", dev, err)
		}
	}
	if err := unix.Mount("proc", filepath.Join(dir, "proc"), "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	for from, to := range map[string]string{"fake": "proc/sys", "fake/sysrq-trigger": "proc/sysrq-trigger", "host/field": "host/field"} {
		err := unix.Mount(filepath.Join(dir, from), filepath.Join(dir, to), "", unix.MS_BIND, "")
		if to == "proc/sysrq-trigger" && errors.Is(err, unix.ENOENT) {
			continue // this kernel has none
		}
		if err != nil {
			return fmt.Errorf("bind %s: %w", to, err)
		}
	}
	if err := unix.Chroot(dir); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return loopbackUp()
}

// loopbackUp sets the loopback interface of this network namespace up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// naiveOpens does what a careless runtime does with /dev/null: it opens the name for writing, wherever that leads.
func naiveOpens(done chan struct{}) {
	for {
		select {
		case <-done:
			return
		default:
		}
		if f, err := os.OpenFile("/dev/null", os.O_WRONLY, 0); err == nil {
			io.WriteString(f, "output of a command")
			f.Close()
		}
		time.Sleep(time.Millisecond)
	}
}

// addKey puts the canary into a keyring that the attacker inherits.
func addKey(canary string) {
	unix.AddKey("user", "warren-canary", []byte(canary), unix.KEY_SPEC_SESSION_KEYRING)
}

// wait waits to be killed.
func wait([]string) error {
	if len(os.Environ()) > 0 && !strings.HasPrefix(os.Environ()[0], "SECRET=") {
		return syscall.EINVAL
	}
	select {}
}
