package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/warren-sandbox/warren"
)

const (
	// maxJSON is how large a manifest or a configuration may be; registries take 4 MiB.
	maxJSON = 4 << 20
	// tries is how often a download is taken up again before it fails.
	tries = 5
	// stall is how long a registry may send nothing before the download is taken up again.
	stall = 60 * time.Second
)

// repository reads one repository of one registry.
type repository struct {
	repo   name.Repository
	client *http.Client
}

// dialRegistry finds out how the registry wants to be spoken to and gets a token for the repository.
func dialRegistry(ctx context.Context, repo name.Repository, insecure bool, keys authn.Keychain) (*repository, error) {
	auth, err := authn.Resolve(ctx, keys, repo)
	if err != nil {
		return nil, fmt.Errorf("%w: cannot read the credentials for %s (%w); look at the Docker configuration and its credential helpers", warren.ErrDenied, repo.RegistryStr(), err)
	}
	base := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 20 * time.Second, KeepAlive: 30 * time.Second, Control: refuseLinkLocal}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   parallel,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   20 * time.Second,
		ResponseHeaderTimeout: stall,
	}
	guarded := &plainGuard{inner: base, insecure: insecure}
	rt, err := transport.NewWithContext(ctx, repo.Registry, auth, guarded, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		base.CloseIdleConnections()
		return nil, registryError(repo, err)
	}
	return &repository{repo: repo, client: &http.Client{Transport: rt, CheckRedirect: checkRedirect}}, nil
}

func (r *repository) close() { r.client.CloseIdleConnections() }

// errPlain says that a registry would have been spoken to without encryption.
var errPlain = errors.New("it speaks plain HTTP only, or leads there; allow that with --insecure if the network between is trusted")

// plainGuard refuses plain HTTP to anything but this machine: a name that looks local is not a reason to trust the network.
type plainGuard struct {
	inner    *http.Transport
	insecure bool
}

func (g *plainGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !g.insecure && !loopback(r.URL.Hostname()) {
		return nil, errPlain
	}
	return g.inner.RoundTrip(r)
}

// CloseIdleConnections lets an http.Client close what the transport below keeps.
func (g *plainGuard) CloseIdleConnections() { g.inner.CloseIdleConnections() }

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// refuseLinkLocal keeps a registry's redirects and token servers away from the metadata services of clouds.
func refuseLinkLocal(_, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	if ip := ap.Addr().Unmap(); ip.IsLinkLocalUnicast() || ip == netip.MustParseAddr("fd00:ec2::254") || ip == netip.MustParseAddr("100.100.100.200") {
		return fmt.Errorf("address %s is not a registry's: %w", ip, warren.ErrDenied)
	}
	return nil
}

// checkRedirect follows a registry to where it keeps its blobs, but not from a public place to a private address.
func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return errors.New("too many redirects")
	}
	from, to := via[0].URL, r.URL
	if from.Scheme == "https" && to.Scheme != "https" {
		return errPlain
	}
	if ip, err := netip.ParseAddr(to.Hostname()); err == nil && to.Hostname() != from.Hostname() && !loopback(from.Hostname()) {
		if ip = ip.Unmap(); ip.IsPrivate() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsUnspecified() {
			return fmt.Errorf("it leads to the private address %s: %w", ip, warren.ErrDenied)
		}
	}
	return nil
}

// registryError says in words what a registry or the way to it refused.
func registryError(repo name.Repository, err error) error {
	where := repo.RegistryStr()
	var te *transport.Error
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, errPlain):
		return fmt.Errorf("registry %s: %w: %w", where, warren.ErrInvalid, errPlain)
	case errors.Is(err, warren.ErrDenied):
		return fmt.Errorf("registry %s: %w", where, err)
	case errors.As(err, &te):
		switch te.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return fmt.Errorf("registry %s refuses access to %s: %w; log in with `docker login %s`, or check that the name is right", where, repo.RepositoryStr(), warren.ErrDenied, where)
		case http.StatusNotFound:
			return fmt.Errorf("registry %s has no %s: %w; check the name", where, repo.RepositoryStr(), warren.ErrNotFound)
		case http.StatusTooManyRequests:
			return fmt.Errorf("registry %s: %w: it asks to wait (too many requests); try later, or log in with `docker login %s`", where, warren.ErrUnavailable, where)
		}
		return fmt.Errorf("registry %s: %w: it answers %d %s", where, warren.ErrUnavailable, te.StatusCode, http.StatusText(te.StatusCode))
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err // without the URL, which may hold a token
	}
	return fmt.Errorf("registry %s cannot be reached: %w: %w; check the name and the network", where, warren.ErrUnavailable, err)
}

func (r *repository) get(ctx context.Context, kind, id string, header http.Header) (*http.Response, error) {
	u := url.URL{Scheme: r.repo.Scheme(), Host: r.repo.RegistryStr(), Path: "/v2/" + r.repo.RepositoryStr() + "/" + kind + "/" + id}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header = header
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, registryError(r.repo, err)
	}
	if err := transport.CheckError(resp, http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable); err != nil {
		resp.Body.Close()
		return nil, registryError(r.repo, err)
	}
	return resp, nil
}

// manifestTypes are what a pull understands.
var manifestTypes = []types.MediaType{types.OCIImageIndex, types.DockerManifestList, types.OCIManifestSchema1, types.DockerManifestSchema2}

// manifest reads a manifest or an index by tag or digest, and checks the digest if it was asked for by one.
func (r *repository) manifest(ctx context.Context, id string) (body []byte, mt types.MediaType, err error) {
	h := http.Header{}
	for _, t := range manifestTypes {
		h.Add("Accept", string(t))
	}
	resp, err := r.get(ctx, "manifests", id, h)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	body, err = readLimited(resp.Body, "manifest")
	if err != nil {
		return nil, "", r.bodyError(err)
	}
	if strings.Contains(id, ":") {
		if got := digestOf(body); got != id {
			return nil, "", fmt.Errorf("registry %s: %w: manifest %s has the digest %s", r.repo.RegistryStr(), warren.ErrInvalid, id, got)
		}
	}
	mt, _, _ = cutMediaType(resp.Header.Get("Content-Type"))
	return body, mt, nil
}

func cutMediaType(s string) (types.MediaType, string, bool) {
	t, params, ok := strings.Cut(s, ";")
	return types.MediaType(strings.TrimSpace(t)), params, ok
}

// bodyError sorts errors of reading an answer.
func (r *repository) bodyError(err error) error {
	if errors.Is(err, warren.ErrInvalid) {
		return err
	}
	return registryError(r.repo, err)
}

func readLimited(r io.Reader, what string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxJSON+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxJSON {
		return nil, fmt.Errorf("%w: the %s is larger than %d bytes", warren.ErrInvalid, what, maxJSON)
	}
	return b, nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// config reads a small blob and checks its digest.
func (r *repository) config(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	resp, err := r.get(ctx, "blobs", d.Digest.String(), http.Header{})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := readLimited(resp.Body, "image's configuration")
	if err != nil {
		return nil, r.bodyError(err)
	}
	if got := digestOf(b); got != d.Digest.String() {
		return nil, fmt.Errorf("registry %s: %w: the image's configuration %s has the digest %s", r.repo.RegistryStr(), warren.ErrInvalid, d.Digest, got)
	}
	return b, nil
}

// blob downloads a layer to the store and returns it open, complete and verified. A download that broke off goes on where it
// stopped, also that of an earlier process. The caller has the layer's lock; progress gets the bytes there are.
func (s *Store) blob(ctx context.Context, r *repository, d v1.Descriptor, progress func(int64)) (*os.File, error) {
	path := filepath.Join(s.dir, "blobs", "sha256", d.Digest.Hex)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, storeError(err)
	}
	for try := 1; ; try++ {
		err = r.download(ctx, f, d, progress)
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
			if err == nil {
				return f, nil
			}
		}
		if !errors.Is(err, warren.ErrUnavailable) || try == tries {
			break
		}
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(time.Duration(try*try) * s.pause):
			continue
		}
		break
	}
	f.Close()
	if !again(err) {
		os.Remove(path)
	}
	return nil, err
}

// again says whether the same pull may succeed later, so that what was downloaded is worth keeping.
func again(err error) bool {
	return errors.Is(err, warren.ErrUnavailable) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// download brings the file to its full size and checks it.
func (r *repository) download(ctx context.Context, f *os.File, d v1.Descriptor, progress func(int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hash := sha256.New()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	have, err := io.Copy(hash, io.LimitReader(f, d.Size+1))
	if err != nil {
		return storeError(err)
	}
	if have > d.Size {
		have = 0
	}
	if have < d.Size {
		header := http.Header{}
		if have > 0 {
			header.Set("Range", fmt.Sprintf("bytes=%d-%d", have, d.Size-1))
		}
		resp, err := r.get(ctx, "blobs", d.Digest.String(), header)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusPartialContent || !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", have)) {
			if resp.StatusCode != http.StatusOK && have > 0 {
				return errors.Join(f.Truncate(0), fmt.Errorf("registry %s: %w: it does not send the rest of a blob", r.repo.RegistryStr(), warren.ErrUnavailable))
			}
			have = 0
			hash.Reset()
		}
		if err := f.Truncate(have); err != nil {
			return storeError(err)
		}
		if _, err := f.Seek(have, io.SeekStart); err != nil {
			return err
		}
		progress(have)
		watchdog := time.AfterFunc(stall, func() {
			cancel(fmt.Errorf("registry %s: %w: it sends nothing", r.repo.RegistryStr(), warren.ErrUnavailable))
		})
		defer watchdog.Stop()
		buf := make([]byte, 256<<10)
		body := io.LimitReader(resp.Body, d.Size-have+1)
		for {
			n, err := body.Read(buf)
			if n > 0 {
				watchdog.Reset(stall)
				if _, err := f.Write(buf[:n]); err != nil {
					return storeError(err)
				}
				hash.Write(buf[:n])
				have += int64(n)
				progress(have)
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				if cause := context.Cause(ctx); cause != nil && ctx.Err() != nil {
					return cause
				}
				return registryError(r.repo, err)
			}
		}
		if have < d.Size {
			return fmt.Errorf("registry %s: %w: a blob broke off after %d of %d bytes", r.repo.RegistryStr(), warren.ErrUnavailable, have, d.Size)
		}
	}
	if got := "sha256:" + hex.EncodeToString(hash.Sum(nil)); have != d.Size || got != d.Digest.String() {
		return fmt.Errorf("registry %s: %w: blob %s is not what its digest says", r.repo.RegistryStr(), warren.ErrInvalid, d.Digest)
	}
	progress(have)
	return nil
}
