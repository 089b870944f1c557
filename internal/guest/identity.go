package guest

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/hold"
	"github.com/warren-sandbox/warren/internal/guest/lifecycle"
	"github.com/warren-sandbox/warren/internal/guest/process"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// identity takes on the identity that /init brings after an event. What the copied memory knew of another sandbox, the
// settings apart, is replaced here, and only then is anybody told. It returns how the image's hooks ended.
func (s *Server) identity(req *initRequest) []lifecycle.Result {
	s.identities.Lock() // one event after the other
	defer s.identities.Unlock()
	if req.Event == lifecycle.Start {
		// The host may say so twice, when it is not sure to have been heard.
		if last, _, ok := s.history.Last(); ok && last.SandboxID == req.SandboxID {
			return nil
		}
	}
	s.furnished.Do(s.furnishRun)
	before, _ := os.Hostname()
	if req.Hostname != "" && s.cfg.ReapOrphans {
		// Drivers name the sandbox too; not every one of them lets the guest do it.
		_ = unix.Sethostname([]byte(req.Hostname))
		if lifecycle.Again(req.Event) {
			s.complain(lifecycle.SystemNames.Set(req.Hostname, before))
		}
	}
	if req.Event == "" {
		return nil
	}
	if lifecycle.Again(req.Event) {
		lifecycle.Stir(req.Entropy)
		s.cpu.reset() // what was counted is another machine's
	}
	e := lifecycle.Event{Name: req.Event, SandboxID: req.SandboxID, ParentID: req.ParentID, Generation: lifecycle.NewUUID(), Time: time.Now()}
	if req.Event == lifecycle.Rollback {
		s.table.Turn()
		s.mu.Lock()
		s.rollback = e.Generation
		s.mu.Unlock()
	}
	s.complain(lifecycle.Files{Dir: s.cfg.RunDir}.Write(e))
	s.history.Add(e)
	if s.cfg.HookDir == "" {
		return nil
	}
	hooks := lifecycle.Hooks{Dir: s.cfg.HookDir, Run: s.runHook}
	if s.cfg.RunDir != "" {
		hooks.Log = filepath.Join(s.cfg.RunDir, "hooks.log")
	}
	return hooks.For(e, req.Entropy)
}

// furnishRun puts the guest's own programs and modules where software inside finds them.
func (s *Server) furnishRun() {
	if s.cfg.RunDir == "" {
		return
	}
	s.complain(lifecycle.WriteLibrary(filepath.Join(s.cfg.RunDir, "lib")))
	s.complain(s.holds().Make())
	// The guest is the program too, by another name.
	bin := s.binDir()
	exe, err := os.Executable()
	if err == nil {
		err = os.MkdirAll(bin, 0o755)
	}
	if err == nil {
		err = os.Symlink(exe, filepath.Join(bin, hold.Command))
	}
	if !errors.Is(err, os.ErrExist) {
		s.complain(err)
	}
}

// binDir is where the guest's own programs are.
func (s *Server) binDir() string { return filepath.Join(s.cfg.RunDir, "bin") }

func (s *Server) holds() hold.Dir { return hold.Dir(filepath.Join(s.cfg.RunDir, "hold")) }

// complain is for what a sandbox can live without; the console of process 1 is where its maker looks.
func (s *Server) complain(err error) {
	if err != nil && s.cfg.ReapOrphans {
		_, _ = os.Stderr.WriteString("warren-guest: " + err.Error() + "\n")
	}
}

// runHook runs one program as root. It is a process of the table like others, since only the table may wait for
// children, but a hidden one.
func (s *Server) runHook(ctx context.Context, path string, env []string, input []byte, limit int) (output []byte, status string, ok bool) {
	root, err := account.System.Lookup("root")
	if err != nil {
		return nil, err.Error(), false
	}
	if os.Geteuid() != 0 {
		root = &account.User{Name: account.System.UserName(uint32(os.Geteuid())), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: "/"}
	}
	p, err := s.table.Start(process.Spec{Cmd: path, Env: append(s.environ(root, nil), env...), Dir: "/", User: root, Stdin: true, Hidden: true})
	if err != nil {
		return nil, err.Error(), false
	}
	defer context.AfterFunc(ctx, func() { _ = p.Kill() })()
	go func() {
		_ = p.Write(ctx, input, false) // a hook need not read it
		_ = p.CloseStdin()
	}()
	f := p.Output.Follow(0)
	defer f.Close()
	// The log's end comes after the process's; one that cannot be killed is given up.
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
	for {
		chunk, err := f.Next(late, -1)
		var lost *process.LostError
		switch {
		case err == nil:
			output = append(output, chunk.Data[:min(len(chunk.Data), limit-len(output))]...)
			continue
		case errors.As(err, &lost):
			continue
		}
		break
	}
	end, ended := p.End()
	if !ended {
		return output, "cannot be killed", false
	}
	return output, end.Status, end.Code == 0
}

// hooksAnswer tells the host how hooks ended: a failed one is its user's to see, and no reason to have no sandbox.
func hooksAnswer(w http.ResponseWriter, results []lifecycle.Result) {
	if len(results) == 0 {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	answer := &wire.InitAnswer{}
	for _, r := range results {
		answer.Hooks = append(answer.Hooks, wire.HookResult{Hook: r.Hook, OK: r.OK, Status: r.Status, Millis: int32(min(r.Took.Milliseconds(), 1<<30))})
	}
	writeJSON(w, wire.Append(nil, answer))
}

func lifecycleMessage(e lifecycle.Event) *wire.LifecycleEvent {
	return &wire.LifecycleEvent{Event: e.Name, SandboxID: e.SandboxID, ParentID: e.ParentID, Generation: e.Generation, Time: &e.Time}
}

func (s *Server) watchLifecycle(c *call, req *wire.WatchLifecycleRequest, send func(any) error) error {
	last, next, ok := s.history.Last()
	current := &wire.LifecycleEvent{}
	if ok {
		current = lifecycleMessage(last)
	}
	if err := send(&wire.WatchLifecycleResponse{Current: current}); err != nil || req.NoFollow {
		return err
	}
	for {
		e, after, ok, err := s.history.Next(c.ctx, next, c.keepalive())
		next = after
		switch {
		case err != nil:
		case ok:
			err = send(&wire.WatchLifecycleResponse{Happened: lifecycleMessage(e)})
		default:
			err = send(&wire.WatchLifecycleResponse{Keepalive: &wire.Empty{}})
		}
		if err != nil {
			return err
		}
	}
}
