package guest

import (
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/file"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

func (s *Server) resolve(u *account.User, path string) (string, error) {
	return file.Resolve(path, u, s.get().dir)
}

// entryCall makes a procedure from one that describes one path.
func (s *Server) entryCall(f func(*account.User, string) (*wire.EntryInfo, error)) func(*call, *wire.PathRequest) (*wire.EntryResponse, error) {
	return func(c *call, req *wire.PathRequest) (*wire.EntryResponse, error) {
		path, err := s.resolve(c.user, req.Path)
		if err != nil {
			return nil, err
		}
		e, err := f(c.user, path)
		return &wire.EntryResponse{Entry: e}, err
	}
}

func (s *Server) fileMove(c *call, req *wire.MoveRequest) (*wire.EntryResponse, error) {
	from, err := s.resolve(c.user, req.Source)
	if err != nil {
		return nil, err
	}
	to, err := s.resolve(c.user, req.Destination)
	if err != nil {
		return nil, err
	}
	e, err := file.Move(c.user, from, to)
	return &wire.EntryResponse{Entry: e}, err
}

func (s *Server) fileList(c *call, req *wire.ListDirRequest) (*wire.ListDirResponse, error) {
	path, err := s.resolve(c.user, req.Path)
	if err != nil {
		return nil, err
	}
	entries, err := file.List(c.user, path, int(min(req.Depth, 1000)))
	return &wire.ListDirResponse{Entries: entries}, err
}

func (s *Server) fileRemove(c *call, req *wire.PathRequest) (*wire.Empty, error) {
	path, err := s.resolve(c.user, req.Path)
	if err != nil {
		return nil, err
	}
	return &wire.Empty{}, file.Remove(c.user, path)
}

// watch starts a watch as a request asks for.
func (s *Server) watch(c *call, req *wire.WatchDirRequest) (*file.Watch, error) {
	path, err := s.resolve(c.user, req.Path)
	if err != nil {
		return nil, err
	}
	return file.NewWatch(c.user, path, file.WatchOptions{Recursive: req.Recursive, Entries: req.IncludeEntry, Network: req.AllowNetworkMounts})
}

func (s *Server) fileWatch(c *call, req *wire.WatchDirRequest, send func(any) error) error {
	if !s.watches.reserve() {
		return errTooManyWatches
	}
	defer s.watches.release()
	w, err := s.watch(c, req)
	if err != nil {
		return err
	}
	defer w.Close()
	if err := send(&wire.WatchDirResponse{Start: &wire.Empty{}}); err != nil {
		return err
	}
	keepalive := time.NewTicker(c.keepalive())
	defer keepalive.Stop()
	for {
		select {
		case <-w.Changed():
		case <-keepalive.C:
			if err := send(&wire.WatchDirResponse{Keepalive: &wire.Empty{}}); err != nil {
				return err
			}
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
		for {
			events, err := w.Take()
			if err != nil {
				return err
			}
			if len(events) == 0 {
				break
			}
			for i := range events {
				if err := send(&wire.WatchDirResponse{Filesystem: &events[i]}); err != nil {
					return err
				}
			}
		}
	}
}

// watchers are the watches whose events clients fetch, and the count of all watches.
type watchers struct {
	mu   sync.Mutex
	n    int
	byID map[string]*watcher
}

type watcher struct {
	*file.Watch
	owner uint32
}

// maxWatches bounds the watches of a sandbox; each holds an inotify instance, of which the kernel gives a user 128.
const maxWatches = 100

var errTooManyWatches = wire.Errorf(wire.ResourceExhausted, "more than %d watches; remove some", maxWatches)

func (w *watchers) reserve() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n >= maxWatches {
		return false
	}
	w.n++
	return true
}

func (w *watchers) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n--
}

func (s *Server) fileCreateWatcher(c *call, req *wire.WatchDirRequest) (*wire.CreateWatcherResponse, error) {
	if !s.watches.reserve() {
		return nil, errTooManyWatches
	}
	w, err := s.watch(c, req)
	if err != nil {
		s.watches.release()
		return nil, err
	}
	id := "w" + randomName()
	s.watches.mu.Lock()
	defer s.watches.mu.Unlock()
	if s.watches.byID == nil {
		s.watches.byID = make(map[string]*watcher)
	}
	s.watches.byID[id] = &watcher{w, c.user.UID}
	return &wire.CreateWatcherResponse{WatcherID: id}, nil
}

// watcher returns the user's watcher with that id; another user's is as good as none.
func (s *Server) watcher(c *call, id string) (*watcher, error) {
	s.watches.mu.Lock()
	defer s.watches.mu.Unlock()
	w := s.watches.byID[id]
	if w == nil || c.user.UID != 0 && c.user.UID != w.owner {
		return nil, wire.Errorf(wire.NotFound, "no watcher %.64q", id)
	}
	return w, nil
}

func (s *Server) fileWatcherEvents(c *call, req *wire.CreateWatcherResponse) (*wire.GetWatcherEventsResponse, error) {
	w, err := s.watcher(c, req.WatcherID)
	if err != nil {
		return nil, err
	}
	events, err := w.Take()
	return &wire.GetWatcherEventsResponse{Events: events}, err
}

func (s *Server) fileRemoveWatcher(c *call, req *wire.CreateWatcherResponse) (*wire.Empty, error) {
	w, err := s.watcher(c, req.WatcherID)
	if err != nil {
		return nil, err
	}
	s.watches.mu.Lock()
	_, there := s.watches.byID[req.WatcherID]
	delete(s.watches.byID, req.WatcherID)
	s.watches.mu.Unlock()
	if there {
		w.Close()
		s.watches.release()
	}
	return &wire.Empty{}, nil
}
