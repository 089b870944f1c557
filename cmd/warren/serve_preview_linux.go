package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/preview"
	"github.com/warren-sandbox/warren/internal/secret"
	"github.com/warren-sandbox/warren/internal/server"
)

// previewPort is where previews are if nobody says otherwise and nobody else is there.
const previewPort = 7080

// listenPreviews listens for browsers, before anything else is begun. It returns nothing where previews are turned off.
func (d *daemon) listenPreviews() ([]net.Listener, error) {
	cfg := d.cfg.Preview
	if cfg.Listen == "off" {
		return nil, nil
	}
	dir := filepath.Join(d.cfg.DataDir, "preview")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if cfg.Cert != "" {
		if err := fitsDomain(cfg.Cert, cfg.Key, cfg.Domain); err != nil {
			return nil, err
		}
	}
	opts := server.TCPOptions{CertFile: cfg.Cert, KeyFile: cfg.Key, Plaintext: cfg.Plaintext, Open: true}
	if cfg.Listen != "" {
		l, err := server.ListenTCP(cfg.Listen, opts)
		if err != nil {
			return nil, fmt.Errorf("preview.listen: %w", err)
		}
		return []net.Listener{l}, nil
	}
	listeners, err := listenAnywhere(filepath.Join(dir, "port"), opts)
	if err != nil {
		// Nothing else needs them.
		d.log.Warn("no previews", "err", err)
		return nil, nil
	}
	return listeners, nil
}

// previews begins to show ports of sandboxes to browsers.
func (d *daemon) previews(eng *engine.Engine, listeners []net.Listener, calls server.Recorder, tries *server.Tries) (server.Previews, error) {
	if len(listeners) == 0 {
		return nil, nil
	}
	cfg := d.cfg.Preview
	key, err := secret.FileKey(filepath.Join(d.cfg.DataDir, "preview", "key"))
	if err != nil {
		return nil, err
	}
	signing, err := key.Derive("previews")
	if err != nil {
		return nil, err
	}
	at := listeners[0].Addr().(*net.TCPAddr)
	o := preview.Options{Engine: eng, Key: signing, Logger: d.log, Domain: cfg.Domain, Secure: cfg.Domain != "", Port: at.Port, Used: d.recordUse(calls), Tries: tries}
	if cfg.Domain != "" && (cfg.Cert == "" || at.Port == 443) {
		o.Port = 0 // that of the proxy in front, or the usual one
	}
	s, err := preview.New(o)
	if err != nil {
		return nil, err
	}
	for _, l := range listeners {
		go func() {
			if err := s.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
				d.log.Error("previews", "err", err)
			}
		}()
	}
	d.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		// Its listeners are closed by now, by whoever opened them.
		if err := s.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	d.log.Info("previews", "address", at.String())
	return s, nil
}

// recordUse puts uses of previews on the record of calls.
func (d *daemon) recordUse(calls server.Recorder) func(preview.Use) {
	return func(u preview.Use) {
		fields := map[string]string{"result": "ok", "requests": strconv.FormatInt(u.Requests, 10)}
		text := func(name, v string) {
			if v != "" {
				fields[name] = v
			}
		}
		text("by", u.By)
		text("remote", u.Remote)
		if u.Refused != "" {
			fields["result"], fields["why"] = "refused", u.Refused
		}
		if u.Port != 0 {
			fields["port"] = strconv.Itoa(int(u.Port))
		}
		if u.Remote == "" { // of what followed the first
			fields["since"] = u.Since.UTC().Format(time.RFC3339)
		}
		if _, err := calls.Append(context.Background(), audit.Record{Actor: u.User, Action: "preview", Sandbox: string(u.Sandbox), Fields: fields}); err != nil {
			d.log.Error("a use of a preview could not be recorded", "sandbox", u.Sandbox, "port", u.Port, "err", err)
		}
	}
}

// fitsDomain refuses a certificate that browsers would refuse.
func fitsDomain(cert, key, domain string) error {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("preview.cert and preview.key: %w: %v", warren.ErrInvalid, err)
	}
	if err := pair.Leaf.VerifyHostname("3000-s." + domain); err != nil {
		return fmt.Errorf("preview.cert %s: %w: it is not for *.%s: %v", cert, warren.ErrInvalid, domain, err)
	}
	return nil
}

// listenAnywhere listens on a port of loopback, the one of last time if it can be, so that links and open pages go on, and remembers it.
// It is the same port in both families where there are two: whoever had the other one would get what is meant for this.
func listenAnywhere(file string, opts server.TCPOptions) ([]net.Listener, error) {
	var ports []int
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	last, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	if last > 0 && last < 65536 {
		ports = append(ports, last)
	}
	ports = append(ports, previewPort, 0, 0, 0, 0)
	for _, port := range ports {
		var first, second net.Listener
		if first, err = server.ListenTCP(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), opts); err != nil {
			continue
		}
		got := first.Addr().(*net.TCPAddr).Port
		second, err = server.ListenTCP(net.JoinHostPort("::1", strconv.Itoa(got)), opts)
		if err != nil && !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.EAFNOSUPPORT) {
			first.Close()
			continue
		}
		if got != last {
			if err := replaceFile(file, strconv.Itoa(got)+"\n"); err != nil {
				first.Close()
				if second != nil {
					second.Close()
				}
				return nil, err
			}
		}
		if second == nil {
			return []net.Listener{first}, nil
		}
		return []net.Listener{first, second}, nil
	}
	return nil, err
}

// replaceFile writes a small file that is whole at any time.
func replaceFile(name, text string) error {
	tmp := name + ".new"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, name)
}
