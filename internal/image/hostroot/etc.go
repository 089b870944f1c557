package hostroot

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/warren-sandbox/warren/driver"
)

// searchPath is where programs are looked for. The directory of Go's own distribution is in it when the host has one.
func (s *skeleton) searchPath() string {
	p := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	s.see("usr/local/go/bin")
	if _, err := s.host.Lstat("usr/local/go/bin"); err == nil {
		p += ":/usr/local/go/bin"
	}
	return p
}

// shell is the login shell of root and user.
func (s *skeleton) shell() string {
	s.see("bin/bash")
	if _, err := s.host.Lstat("bin/bash"); err == nil {
		return "/bin/bash"
	}
	return "/bin/sh"
}

// sudo reports whether the host has sudo. Without it, a file that promises what it does would only mislead.
func (s *skeleton) sudo() bool {
	found := false
	for _, name := range []string{"usr/bin/sudo", "usr/local/bin/sudo", "bin/sudo"} {
		s.see(name)
		_, err := s.host.Lstat(name)
		found = found || err == nil
	}
	return found
}

// homeOf holds the homes that Debian gives its own system users; nothing exists there but what packages make.
var homeOf = map[string]string{"daemon": "/usr/sbin", "bin": "/bin", "sys": "/dev", "man": "/var/cache/man", "mail": "/var/mail",
	"www-data": "/var/www", "backup": "/var/backups", "games": "/usr/games"}

// accounts writes passwd, group and shadow: root, the user that works in the sandbox, nobody, and the host's system users by
// name and id, since files in /usr belong to them and packages ask for them. No password of the host is read at all.
func (s *skeleton) accounts() error {
	sh := s.shell()
	var passwd, shadow, group, gshadow strings.Builder
	user := func(name string, uid, gid uint32, gecos, home, shell string) {
		fmt.Fprintf(&passwd, "%s:x:%d:%d:%s:%s:%s\n", name, uid, gid, gecos, home, shell)
		fmt.Fprintf(&shadow, "%s:*:19000:0:99999:7:::\n", name)
	}
	user("root", 0, 0, "root", "/root", sh)
	users := s.hostAccounts("etc/passwd")
	if !slices.ContainsFunc(users, func(a account) bool { return a.name == "daemon" || a.id == 1 }) {
		users = append([]account{{"daemon", 1, 1}}, users...)
	}
	if !slices.ContainsFunc(users, func(a account) bool { return a.name == "_apt" || a.id == 42 }) {
		users = append(users, account{"_apt", 42, nogroup})
	}
	for _, a := range users {
		home := homeOf[a.name]
		if home == "" {
			home = "/nonexistent"
		}
		user(a.name, a.id, a.gid, "", home, "/usr/sbin/nologin")
	}
	user("nobody", nogroup, nogroup, "nobody", "/nonexistent", "/usr/sbin/nologin")
	user("user", driver.SandboxUID, driver.SandboxUID, "", "/home/user", sh)

	add := func(name string, gid uint32, members string) {
		fmt.Fprintf(&group, "%s:x:%d:%s\n", name, gid, members)
		fmt.Fprintf(&gshadow, "%s:*::%s\n", name, members)
	}
	add("root", 0, "")
	for _, a := range s.hostAccounts("etc/group") {
		members := ""
		if a.name == "sudo" || a.name == "wheel" {
			members = "user"
		}
		add(a.name, a.id, members)
	}
	add("nogroup", nogroup, "")
	add("user", driver.SandboxUID, "")

	return s.files([]content{
		{"etc/passwd", passwd.String(), 0o644},
		{"etc/group", group.String(), 0o644},
		{"etc/shadow", shadow.String(), 0o600},
		{"etc/gshadow", gshadow.String(), 0o600},
		{"etc/subuid", "", 0o644},
		{"etc/subgid", "", 0o644},
	})
}

// content is a file that the skeleton makes up.
type content struct {
	name, text string
	mode       fs.FileMode
}

func (s *skeleton) files(list []content) error {
	for _, f := range list {
		if err := s.file(f.name, f.text, f.mode); err != nil {
			return err
		}
	}
	return nil
}

const profile = `# System-wide profile of the sandbox, for login shells.
export PATH="%s"
if [ -n "${BASH-}" ] && [ "$BASH" != "/bin/sh" ] && [ -n "${PS1-}" ] && [ -f /etc/bash.bashrc ]; then
  . /etc/bash.bashrc
fi
if [ -d /etc/profile.d ]; then
  for i in /etc/profile.d/*.sh; do
    if [ -r "$i" ]; then
      . "$i"
    fi
  done
  unset i
fi
`

const systemBashrc = `# System-wide file for interactive shells.
[ -z "${PS1-}" ] && return
shopt -s checkwinsize
PS1='\u@\h:\w\$ '
if [ -z "${BASH_COMPLETION_VERSINFO-}" ] && [ -f /usr/share/bash-completion/bash_completion ]; then
  . /usr/share/bash-completion/bash_completion
fi
`

const userBashrc = `# For interactive shells.
case $- in
  *i*) ;;
  *) return ;;
esac
HISTCONTROL=ignoreboth
HISTSIZE=10000
HISTFILESIZE=20000
shopt -s histappend checkwinsize
if [ -x /usr/bin/dircolors ]; then
  eval "$(dircolors -b)"
  alias ls='ls --color=auto'
  alias grep='grep --color=auto'
fi
alias ll='ls -alF'
`

const userProfile = `# For login shells.
if [ -n "${BASH_VERSION-}" ] && [ -f "$HOME/.bashrc" ]; then
  . "$HOME/.bashrc"
fi
if [ -d "$HOME/bin" ]; then
  PATH="$HOME/bin:$PATH"
fi
if [ -d "$HOME/.local/bin" ]; then
  PATH="$HOME/.local/bin:$PATH"
fi
`

// Sudoers lets the sandbox's user become root inside it without a password, where there is sudo.
const Sudoers = `# Inside the sandbox, the user may do everything without a password.
Defaults env_reset
Defaults secure_path="%s"
root ALL=(ALL:ALL) ALL
user ALL=(ALL:ALL) NOPASSWD: ALL
#includedir /etc/sudoers.d
`

// etc writes what is the sandbox's own, whatever the host has under these names.
func (s *skeleton) etc() error {
	p := s.searchPath()
	if err := s.files([]content{
		{"etc/hostname", "sandbox\n", 0o644},
		{"etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n", 0o644},
		{"etc/resolv.conf", "# No name server: this sandbox has no network beyond its loopback.\n", 0o644},
		{"etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\ngshadow: files\nhosts: files dns\nnetworks: files\n" +
			"protocols: db files\nservices: db files\nethers: db files\nrpc: db files\nnetgroup: files\n", 0o644},
		{"etc/networks", "default 0.0.0.0\nloopback 127.0.0.0\nlink-local 169.254.0.0\n", 0o644},
		{"etc/profile", fmt.Sprintf(profile, p), 0o644},
		{"etc/environment", "PATH=\"" + p + "\"\n", 0o644},
		{"etc/bash.bashrc", systemBashrc, 0o644},
		{"etc/skel/.bashrc", userBashrc, 0o644},
		{"etc/skel/.profile", userProfile, 0o644},
		{"etc/fstab", "", 0o644},
		{"etc/machine-id", "", 0o444},
		{"etc/gitconfig", "# Settings for every user of the sandbox; none come from the host.\n", 0o644},
		{"etc/security/limits.conf", "", 0o644},
		{"etc/security/access.conf", "", 0o644},
		{"etc/apt/apt.conf.d/10warren", "// Packages in a sandbox come without what they merely recommend.\nAPT::Install-Recommends \"false\";\n", 0o644},
	}); err != nil {
		return err
	}
	if s.sudo() {
		if err := s.files([]content{{"etc/sudoers", fmt.Sprintf(Sudoers, p), 0o440}}); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		name string
		mode fs.FileMode
	}{{"etc/profile.d", 0o755}, {"etc/sudoers.d", 0o750}, {"etc/ssl", 0o755}, {"etc/ssl/private", 0o710}, {"etc/opt", 0o755},
		{"etc/default", 0o755}, {"etc/cron.d", 0o755}, {"etc/init.d", 0o755}, {"etc/security/limits.d", 0o755},
		{"etc/apt/preferences.d", 0o755}, {"etc/apt/keyrings", 0o755}, {"etc/apt/trusted.gpg.d", 0o755}, {"etc/apt/auth.conf.d", 0o755},
		{"etc/dpkg/dpkg.cfg.d", 0o755}, {"etc/alternatives", 0o755}} {
		if err := s.dir(d.name, d.mode, 0, 0); err != nil {
			return err
		}
	}
	if err := s.link("etc/mtab", "../proc/self/mounts"); err != nil {
		return err
	}
	return s.aptSources()
}

// aptSources names the distribution's public archive. The host's own sources stay out: they may hold passwords, tokens in
// paths and names of private mirrors.
func (s *skeleton) aptSources() error {
	s.see("etc/os-release")
	b, err := s.host.ReadFile("etc/os-release", 1<<16)
	if err != nil {
		return nil
	}
	release := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			release[k] = strings.Trim(v, `"'`)
		}
	}
	code := release["VERSION_CODENAME"]
	if !accountName.MatchString(code) {
		return nil
	}
	stanza := func(uri, suites, components, keyring string) string {
		return fmt.Sprintf("Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\nSigned-By: /usr/share/keyrings/%s\n\n", uri, suites, components, keyring)
	}
	text := ""
	switch release["ID"] {
	case "debian":
		const ring = "debian-archive-keyring.gpg"
		text = stanza("http://deb.debian.org/debian", code+" "+code+"-updates", "main", ring) +
			stanza("http://deb.debian.org/debian-security", code+"-security", "main", ring)
	case "ubuntu":
		const ring = "ubuntu-archive-keyring.gpg"
		text = stanza("http://archive.ubuntu.com/ubuntu", code+" "+code+"-updates", "main universe", ring) +
			stanza("http://security.ubuntu.com/ubuntu", code+"-security", "main universe", ring)
	default:
		return nil
	}
	return s.file(path.Join("etc/apt/sources.list.d", release["ID"]+".sources"), text, 0o644)
}

// Rules of PAM that know passwd and shadow and nothing else: the host's may ask directories or modules that are not there.
const (
	pamAuth     = "auth [success=1 default=ignore] pam_unix.so nullok\nauth requisite pam_deny.so\nauth required pam_permit.so\n"
	pamAccount  = "account [success=1 new_authtok_reqd=done default=ignore] pam_unix.so\naccount requisite pam_deny.so\naccount required pam_permit.so\n"
	pamPassword = "password [success=1 default=ignore] pam_unix.so obscure yescrypt\npassword requisite pam_deny.so\npassword required pam_permit.so\n"
	pamSession  = "session [default=1] pam_permit.so\nsession requisite pam_deny.so\nsession required pam_permit.so\nsession required pam_unix.so\n"
)

func (s *skeleton) pam() error {
	all := pamAuth + pamAccount + pamPassword + pamSession
	rootOK := "auth sufficient pam_rootok.so\n" + all
	list := []content{
		{"etc/pam.d/common-auth", pamAuth, 0o644},
		{"etc/pam.d/common-account", pamAccount, 0o644},
		{"etc/pam.d/common-password", pamPassword, 0o644},
		{"etc/pam.d/common-session", pamSession, 0o644},
		{"etc/pam.d/common-session-noninteractive", pamSession, 0o644},
		{"etc/pam.d/other", all, 0o644},
	}
	for _, name := range []string{"sudo", "sudo-i", "login", "passwd", "chpasswd", "newusers"} {
		list = append(list, content{"etc/pam.d/" + name, all, 0o644})
	}
	for _, name := range []string{"su", "su-l", "runuser", "runuser-l", "chsh", "chfn"} {
		list = append(list, content{"etc/pam.d/" + name, rootOK, 0o644})
	}
	return s.files(list)
}

// homes gives root and user what a new account gets.
func (s *skeleton) homes() error {
	for _, f := range []struct {
		name, text string
		uid        uint32
	}{
		{"root/.bashrc", userBashrc, 0}, {"root/.profile", userProfile, 0},
		{"home/user/.bashrc", userBashrc, driver.SandboxUID}, {"home/user/.profile", userProfile, driver.SandboxUID},
	} {
		if err := s.fileOf(f.name, f.text, 0o644, f.uid); err != nil {
			return err
		}
	}
	return nil
}
