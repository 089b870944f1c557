package guest

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/file"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// files serves GET, HEAD and POST /files: bytes down and up.
func (s *Server) files(w http.ResponseWriter, r *http.Request) {
	op := "read"
	switch r.Method {
	case http.MethodGet, http.MethodHead:
	case http.MethodPost:
		op = "write"
	default:
		w.Header().Set("Allow", "GET, HEAD, POST")
		httpError(w, http.StatusMethodNotAllowed, "use GET or POST")
		return
	}
	q := r.URL.Query()
	if err := s.mayUseFiles(r, q, op); err != "" {
		httpError(w, http.StatusUnauthorized, err)
		return
	}
	name := q.Get("username")
	if name == "" {
		name, _, _ = r.BasicAuth()
	}
	u, err := s.user(name)
	if err == nil {
		if op == "read" {
			err = s.download(w, r, u, q.Get("path"))
		} else {
			err = s.upload(w, r, u, q)
		}
	}
	if err != nil {
		fileError(w, err)
	}
}

// fileError answers with the status that the plain paths use for an error.
func fileError(w http.ResponseWriter, err error) {
	e := wire.AsError(err)
	status := e.Code.Status()
	switch {
	case e.Code == wire.ResourceExhausted:
		status = http.StatusInsufficientStorage
	case e.Code == wire.AlreadyExists:
		status = http.StatusConflict
	}
	httpError(w, status, e.Message)
}

// mayUseFiles checks the token or the signature of a request; it returns what is wrong, or "".
func (s *Server) mayUseFiles(r *http.Request, q url.Values, op string) string {
	token := s.get().token
	if token == nil {
		return ""
	}
	if given := r.Header.Get("X-Access-Token"); given != "" {
		if !token.matches(given) {
			return "the access token is not valid"
		}
		return ""
	}
	signature := q.Get("signature")
	if signature == "" {
		if trusted(r) {
			return ""
		}
		return "a signature or an access token is needed"
	}
	s.mu.RLock()
	raw := s.settings.signing
	s.mu.RUnlock()
	want := sign(q.Get("path"), op, q.Get("username"), raw, q.Get("signature_expiration"))
	if subtle.ConstantTimeCompare([]byte(signature), []byte(want)) != 1 {
		return "invalid signature"
	}
	if exp := q.Get("signature_expiration"); exp != "" {
		at, err := strconv.ParseInt(exp, 10, 64)
		if err != nil || at < time.Now().Unix() {
			return "signature is already expired"
		}
	}
	return ""
}

// sign makes the signature of a URL of /files.
func sign(path, op, user, token, expiration string) string {
	text := path + ":" + op + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	d := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(d[:])
}

// maxVirtual bounds what is read of a file whose size the kernel does not tell, as in /proc.
const maxVirtual = 16 << 20

// download sends a file.
func (s *Server) download(w http.ResponseWriter, r *http.Request, u *account.User, path string) error {
	path, err := s.resolve(u, path)
	if err != nil {
		return err
	}
	f, st, err := file.Open(u, path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	ctype := mime.TypeByExtension(filepath.Ext(path))
	if ctype == "" {
		ctype = "application/octet-stream"
	}
	h.Set("Content-Type", ctype)
	h.Add("Vary", "Accept-Encoding")
	if st.Size() == 0 {
		data, err := io.ReadAll(io.LimitReader(f, maxVirtual))
		if err != nil {
			return file.Wrap(err, path)
		}
		http.ServeContent(w, r, "", st.ModTime(), bytes.NewReader(data))
		return nil
	}
	if wantsGzip(r) && r.Method == http.MethodGet {
		h.Set("Content-Encoding", "gzip")
		h.Set("Last-Modified", st.ModTime().UTC().Format(http.TimeFormat))
		z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
		if _, err := io.Copy(z, f); err == nil {
			_ = z.Close() // the client may have gone
			return nil
		}
		panic(http.ErrAbortHandler) // cut the connection: the client must not take a part for the whole
	}
	http.ServeContent(w, r, "", st.ModTime(), f)
	return nil
}

// wantsGzip says whether a client insists on gzip. Compressing costs far more than the loopback saves, so a client
// that takes plain bytes as well gets those.
func wantsGzip(r *http.Request) bool {
	if r.Header.Get("Range") != "" {
		return false
	}
	gz, identity := false, true
	for part := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		name, params, _ := strings.Cut(strings.TrimSpace(part), ";")
		zero := false
		if v, ok := strings.CutPrefix(strings.ReplaceAll(params, " ", ""), "q="); ok {
			q, err := strconv.ParseFloat(v, 64)
			zero = err == nil && q == 0
		}
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "gzip":
			gz = !zero
		case "identity", "*":
			identity = !zero
		}
	}
	return gz && !identity
}

// upload takes one file as octet-stream, or several as parts of a form.
func (s *Server) upload(w http.ResponseWriter, r *http.Request, u *account.User, q url.Values) error {
	var body io.Reader = r.Body
	switch enc := r.Header.Get("Content-Encoding"); strings.ToLower(enc) {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return wire.Errorf(wire.InvalidArgument, "the body is not gzip")
		}
		body = z
	default:
		return wire.Errorf(wire.InvalidArgument, "unknown Content-Encoding %.40q; use gzip or none", enc)
	}
	md, err := metadataOf(r.Header)
	if err != nil {
		return err
	}
	ctype, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	var written []writtenFile
	switch ctype {
	case "application/octet-stream":
		if q.Get("path") == "" {
			return wire.Errorf(wire.InvalidArgument, "the query must name a path")
		}
		f, err := s.store(u, q.Get("path"), body, md)
		if err != nil {
			return err
		}
		written = append(written, f)
	case "multipart/form-data":
		if params["boundary"] == "" {
			return wire.Errorf(wire.InvalidArgument, "the form has no boundary")
		}
		if written, err = s.storeParts(u, multipart.NewReader(body, params["boundary"]), q, md); err != nil {
			return err
		}
	default:
		return wire.Errorf(wire.InvalidArgument, "Content-Type must be multipart/form-data or application/octet-stream")
	}
	writeJSON(w, appendWritten(nil, written, md))
	return nil
}

// maxParts bounds the files of one form.
const maxParts = 10_000

func (s *Server) storeParts(u *account.User, form *multipart.Reader, q url.Values, md map[string]string) ([]writtenFile, error) {
	var written []writtenFile
	seen := make(map[string]bool)
	for {
		// Not NextPart, which would decode quoted-printable behind our back.
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) && len(written) > 0 {
			return written, nil
		}
		if errors.Is(err, io.EOF) {
			return nil, wire.Errorf(wire.InvalidArgument, "the form has no part named \"file\"")
		}
		if err != nil {
			return nil, wire.Errorf(wire.InvalidArgument, "the form cannot be read: %v", err)
		}
		name, filename := disposition(part.Header.Get("Content-Disposition"))
		if name != "file" {
			continue
		}
		if len(written) >= maxParts {
			return nil, wire.Errorf(wire.InvalidArgument, "more than %d files at a time", maxParts)
		}
		path := q.Get("path")
		if path == "" {
			path = filename
		}
		if path == "" {
			return nil, wire.Errorf(wire.InvalidArgument, "a part names no file, and the query no path")
		}
		f, err := s.store(u, path, part, md)
		if err != nil {
			return nil, err
		}
		if seen[f.path] {
			return nil, wire.Errorf(wire.InvalidArgument, "path '%s' is written twice", f.path)
		}
		seen[f.path] = true
		written = append(written, f)
	}
}

type writtenFile struct{ path, name string }

// appendWritten appends the answer to an upload. Clients compare it whole, so it has these fields and no others.
func appendWritten(dst []byte, files []writtenFile, md map[string]string) []byte {
	dst = append(dst, '[')
	for i, f := range files {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"path":`...)
		dst = wire.AppendString(dst, f.path)
		dst = append(dst, `,"name":`...)
		dst = wire.AppendString(dst, f.name)
		dst = append(dst, `,"type":"file"`...)
		if len(md) > 0 {
			dst = append(dst, `,"metadata":`...)
			dst = wire.AppendMap(dst, md)
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}

// store writes one file as the user.
func (s *Server) store(u *account.User, path string, body io.Reader, md map[string]string) (writtenFile, error) {
	path, err := s.resolve(u, path)
	if err != nil {
		return writtenFile{}, err
	}
	f, err := file.Create(u, path)
	if err != nil {
		return writtenFile{}, err
	}
	defer f.Close()
	if _, err := io.CopyBuffer(onlyWriter{f}, body, make([]byte, 128<<10)); err != nil {
		return writtenFile{}, writeFailure(err, path)
	}
	if err := file.SetMetadata(u, f, path, md); err != nil {
		return writtenFile{}, err
	}
	if err := f.Close(); err != nil {
		return writtenFile{}, writeFailure(err, path)
	}
	return writtenFile{path: path, name: filepath.Base(path)}, nil
}

// onlyWriter hides ReadFrom, whose own ways (splice, sendfile) do not use the buffer.
type onlyWriter struct{ io.Writer }

// writeFailure tells a disk that refuses from a client that stops.
func writeFailure(err error, path string) error {
	var errno syscall.Errno
	var pathErr *os.PathError
	if errors.As(err, &pathErr) && errors.As(err, &errno) {
		return file.Wrap(err, path)
	}
	return wire.Errorf(wire.InvalidArgument, "path '%s': the upload broke off: %v", path, err)
}

const (
	metadataHeader  = "X-Metadata-"
	maxMetadataKeys = 64
)

// metadataOf collects the metadata headers of an upload.
func metadataOf(h http.Header) (map[string]string, error) {
	md := make(map[string]string)
	for k, v := range h {
		key, ok := strings.CutPrefix(k, metadataHeader)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		if key == "" || len(key) > 200 || len(v[0]) > 4096 || len(md) >= maxMetadataKeys {
			return nil, wire.Errorf(wire.InvalidArgument, "metadata %.40q: at most %d keys of 200 bytes, each with a value of 4096", key, maxMetadataKeys)
		}
		md[key] = v[0]
	}
	return md, nil
}

// disposition reads the name and the file name of a part's Content-Disposition. The file name is taken as it is,
// with its directories: package mime/multipart would cut those off, and clients send the whole path there.
func disposition(v string) (name, filename string) {
	_, rest, _ := strings.Cut(v, ";")
	for rest != "" {
		var key, val string
		rest = strings.TrimLeft(rest, " \t;")
		i := strings.IndexAny(rest, "=;")
		if i < 0 || rest[i] == ';' {
			if i < 0 {
				break
			}
			rest = rest[i:]
			continue
		}
		key, rest = strings.ToLower(strings.TrimSpace(rest[:i])), strings.TrimLeft(rest[i+1:], " \t")
		if strings.HasPrefix(rest, `"`) {
			val, rest = quoted(rest)
		} else {
			val, rest, _ = strings.Cut(rest, ";")
			val = strings.TrimSpace(val)
		}
		switch key {
		case "name":
			name = val
		case "filename":
			if filename == "" {
				filename = unescapeFilename(val)
			}
		case "filename*":
			// RFC 5987: charset'language'percent-encoded.
			if parts := strings.SplitN(val, "'", 3); len(parts) == 3 {
				if dec, err := url.PathUnescape(parts[2]); err == nil {
					filename = dec
				}
			}
		}
	}
	return name, filename
}

// quoted reads a quoted string, whose backslashes escape quotes and backslashes only: some clients send them plain.
func quoted(s string) (val, rest string) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return b.String(), s[i+1:]
		case s[i] == '\\' && i+1 < len(s) && (s[i+1] == '"' || s[i+1] == '\\'):
			i++
			b.WriteByte(s[i])
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String(), ""
}

// unescapeFilename undoes what browsers and fetch do to a file name in a form: quotes and line ends are
// percent-encoded, and nothing else is.
var unescapeFilename = strings.NewReplacer("%22", `"`, "%0A", "\n", "%0D", "\r").Replace

// composeRequest is the body of POST /files/compose.
type composeRequest struct {
	SourcePaths []string `json:"sourcePaths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username"`
}

// maxSources bounds the files that one compose joins.
const maxSources = 10_000

// compose writes one file that holds others one after another. The destination may be one of the sources.
func (s *Server) compose(w http.ResponseWriter, r *http.Request) {
	var req composeRequest
	if !readJSON(w, r, &req) {
		return
	}
	name := req.Username
	if name == "" {
		name, _, _ = r.BasicAuth()
	}
	u, err := s.user(name)
	if err == nil {
		var f writtenFile
		if f, err = s.join(u, &req); err == nil {
			body := appendWritten(nil, []writtenFile{f}, nil)
			writeJSON(w, body[1:len(body)-1])
			return
		}
	}
	fileError(w, err)
}

func (s *Server) join(u *account.User, req *composeRequest) (writtenFile, error) {
	if len(req.SourcePaths) == 0 || len(req.SourcePaths) > maxSources || req.Destination == "" {
		return writtenFile{}, wire.Errorf(wire.InvalidArgument, "give a destination and 1 to %d source_paths", maxSources)
	}
	dest, err := s.resolve(u, req.Destination)
	if err != nil {
		return writtenFile{}, err
	}
	// The parts go to a file beside the destination first: a source that is missing leaves the destination as it was.
	tmp := filepath.Join(filepath.Dir(dest), ".compose-"+randomName())
	out, err := file.Create(u, tmp)
	if err != nil {
		return writtenFile{}, err
	}
	defer func() {
		out.Close()
		_ = file.Remove(u, tmp) // gone already when all went well
	}()
	for _, src := range req.SourcePaths {
		path, err := s.resolve(u, src)
		if err != nil {
			return writtenFile{}, err
		}
		in, _, err := file.Open(u, path)
		if err != nil {
			return writtenFile{}, err
		}
		_, err = io.Copy(out, in)
		in.Close()
		if err != nil {
			return writtenFile{}, file.Wrap(err, dest)
		}
	}
	if err := out.Close(); err != nil {
		return writtenFile{}, file.Wrap(err, dest)
	}
	if _, err := file.Move(u, tmp, dest); err != nil {
		return writtenFile{}, err
	}
	return writtenFile{path: dest, name: filepath.Base(dest)}, nil
}
