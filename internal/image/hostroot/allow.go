package hostroot

import "regexp"

// item is one name below /etc of the host that shows in the image. What is not in the list does not.
type item struct {
	// path below /etc; its last part may be a pattern of package path.
	path string
	kind kind
	// why says which programs of /usr need it; nothing enters the list without a reason.
	why string
}

type kind int

const (
	// whole copies a file, or a directory with everything below it: files that every user of the host can read, and
	// symbolic links that lead to what the image shows.
	whole kind = iota
	// links copies only the symbolic links of a directory that lead to what the image shows.
	links
	// certificates copies only files that hold nothing but public certificates; links that lead elsewhere are resolved.
	certificates
)

// allowed holds what belongs to the programs in /usr rather than to the machine or to its users. Files that people
// put tokens, proxies or passwords into stay out: npmrc, pip.conf, gitconfig, wgetrc, curlrc, maven/settings.xml, apt sources,
// apt.conf, profile.d, environment, ssh, docker.
var allowed = []item{
	{"alternatives", links, "/usr/bin/java, awk, editor and hundreds more lead through it"},
	{"ld.so.conf", whole, "the dynamic linker finds libraries by it"},
	{"ld.so.conf.d", whole, "the dynamic linker finds libraries by it"},
	{"ld.so.cache", whole, "the dynamic linker finds libraries by it, without running ldconfig"},
	{"localtime", whole, "times of day as the host shows them"},
	{"timezone", whole, "the name of the time zone"},
	{"mime.types", whole, "Python's mimetypes and web servers"},
	{"magic", whole, "file(1)"},
	{"magic.mime", whole, "file(1)"},
	{"services", whole, "getservbyname"},
	{"protocols", whole, "getprotobyname"},
	{"rpc", whole, "getrpcbyname"},
	{"ethertypes", whole, "tcpdump, ebtables"},
	{"gai.conf", whole, "getaddrinfo's order of addresses"},
	{"host.conf", whole, "the resolver library"},
	{"shells", whole, "su and chsh"},
	{"login.defs", whole, "su, useradd and the postinst scripts of packages"},
	{"adduser.conf", whole, "adduser in the postinst scripts of packages"},
	{"deluser.conf", whole, "deluser in the postrm scripts of packages"},
	{"debconf.conf", whole, "debconf in the postinst scripts of packages"},
	{"ucf.conf", whole, "ucf in the postinst scripts of packages"},
	{"dpkg/dpkg.cfg", whole, "dpkg"},
	{"dpkg/origins", whole, "dpkg-vendor, which dpkg-buildflags and so every Debian build asks"},
	{"apt/apt.conf.d/01autoremove", whole, "apt autoremove keeps what it should"},
	{"apt/apt.conf.d/70debconf", whole, "apt configures packages before it unpacks them"},
	{"os-release", whole, "programs that ask which distribution this is"},
	{"lsb-release", whole, "programs that ask which distribution this is"},
	{"debian_version", whole, "programs that ask which distribution this is"},
	{"redhat-release", whole, "programs that ask which distribution this is"},
	{"alpine-release", whole, "programs that ask which distribution this is"},
	{"locale.alias", whole, "/usr/share/locale/locale.alias leads to it"},
	{"locale.conf", whole, "the default language"},
	{"default/locale", whole, "the default language"},
	{"inputrc", whole, "readline's keys"},
	{"terminfo", whole, "ncurses"},
	{"vim/vimrc", whole, "/usr/share/vim/vimrc leads to it"},
	{"vim/vimrc.tiny", whole, "vim.tiny"},
	{"nanorc", whole, "nano"},
	{"groff", whole, "man pages; /usr/share/groff leads to it"},
	{"manpath.config", whole, "man"},
	{"fonts", whole, "fontconfig, and so everything that draws text"},
	{"glvnd", whole, "OpenGL and Vulkan loaders"},
	{"OpenCL/vendors", whole, "the OpenCL loader"},
	{"ImageMagick-[0-9]*", whole, "ImageMagick refuses to read some formats without its policy"},
	{"xattr.conf", whole, "cp -a and tar --xattrs skip what must not be copied"},
	{"xml", whole, "xmllint and xsltproc find local catalogues instead of the network"},
	{"sgml", whole, "docbook"},
	{"bash_completion", whole, "bash completion"},
	{"bash_completion.d", whole, "bash completion"},
	{"ssl/openssl.cnf", whole, "OpenSSL refuses to run some commands without it"},
	{"ssl/certs", certificates, "TLS"},
	{"ca-certificates.conf", whole, "update-ca-certificates"},
	{"pki/tls/certs", certificates, "TLS on Fedora and its kin"},
	{"pki/ca-trust/extracted", certificates, "TLS on Fedora and its kin"},
	{"pki/tls/openssl.cnf", whole, "OpenSSL on Fedora and its kin"},
	{"crypto-policies/back-ends", whole, "OpenSSL on Fedora and its kin includes it"},
	{"java-[0-9]*", whole, "/usr/lib/jvm leads to it: Java does not start without its security file"},
	{"maven/m2.conf", whole, "mvn does not start without it"},
	{"maven/logging", whole, "mvn"},
	{"python3", whole, "py3compile in the postinst scripts of packages"},
	{"python[0-9]*", whole, "/usr/lib/python3.*/sitecustomize.py leads to it"},
	{"perl", whole, "Net::Config and the system's sitecustomize"},
	{"php/*/mods-available", whole, "php finds its extensions"},
	{"php/*/cli/conf.d", whole, "php finds its extensions"},
	{"R/Renviron", whole, "R does not start without it"},
	{"R/ldpaths", whole, "R does not start without it"},
	{"R/Makeconf", whole, "R packages build with it"},
	{"R/javaconf", whole, "R"},
	{"mono/config", whole, "mono maps its libraries by it"},
	{"gprofng.rc", whole, "gprofng"},
	{"gdb/gdbinit", whole, "gdb"},
	{"X11/rgb.txt", whole, "names of colours; /usr/share/X11 leads to it"},
	{"X11/app-defaults", whole, "/usr/share/X11/app-defaults leads to it"},
}

const (
	// maxFile is the largest file that is copied; the linker's cache and trust stores are the large ones.
	maxFile = 8 << 20
	// maxCopied bounds the skeleton, so that a host with something odd below an allowed name is told and not copied.
	maxCopied = 64 << 20
	// maxEntries bounds the names that are copied.
	maxEntries = 20000
)

// accountName is what a name in passwd and group may look like.
var accountName = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
