package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/wire"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

// procedures are the paths of all calls, with what each does in words.
var procedures = func() map[string]string {
	m := map[string]string{}
	services := warrenv1.File_warren_v1_warren_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			name := string(methods.Get(j).Name())
			m["/"+string(services.Get(i).FullName())+"/"+name] = words(name)
		}
	}
	return m
}()

// words splits a name such as CreateSandbox.
func words(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte(' ')
		}
		b.WriteRune(r)
	}
	return strings.ToLower(b.String())
}

// uploads are the calls whose requests are streams.
var uploads = map[string]bool{warrenv1connect.ImageServiceImportImageProcedure: true}

// lasting are the calls that end when the caller or the server wishes, and not by themselves.
var lasting = map[string]bool{warrenv1connect.SandboxServiceWatchEventsProcedure: true}

// errorInterceptor makes what handlers return into what callers may see.
type errorInterceptor struct{ s *Server }

func (i errorInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		defer i.recover(ctx, req.Spec().Procedure, &err)
		if res, err = next(ctx, req); err != nil {
			return nil, i.convert(ctx, req.Spec().Procedure, err)
		}
		return res, nil
	}
}

func (i errorInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i errorInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		defer i.recover(ctx, conn.Spec().Procedure, &err)
		if err := next(ctx, conn); err != nil {
			return i.convert(ctx, conn.Spec().Procedure, err)
		}
		return nil
	}
}

// recover makes an error of a panic, so that a stream that has begun ends with one too.
func (i errorInterceptor) recover(ctx context.Context, procedure string, err *error) {
	if p := recover(); p == http.ErrAbortHandler {
		panic(p)
	} else if p != nil {
		*err = i.convert(ctx, procedure, fmt.Errorf("panic: %v\n%s", p, debug.Stack()))
	}
}

func (i errorInterceptor) convert(ctx context.Context, procedure string, err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) {
		// Of connect itself: a message that is too large, or that is none.
		for _, k := range wire.Kinds {
			if k.Code == ce.Code() {
				return (&wire.Fault{Kind: k, Op: procedures[procedure], Message: printable(ce.Message(), 1<<10)}).Connect()
			}
		}
	}
	return i.s.judge(ctx, procedures[procedure], err).Connect()
}

// maxJSONDepth is deeper than any message of the contract.
const maxJSONDepth = 32

// strictJSON is JSON that refuses what it does not know: a field with a typing error must not be taken for one that was left
// out.
type strictJSON struct{ name string }

func (c strictJSON) Name() string { return c.name }

func (c strictJSON) Marshal(m any) ([]byte, error) {
	return protojson.MarshalOptions{}.Marshal(m.(proto.Message))
}

func (c strictJSON) Unmarshal(data []byte, m any) error {
	if len(data) == 0 {
		return errors.New("an empty body is not JSON; want at least {}")
	}
	return protojson.UnmarshalOptions{RecursionLimit: maxJSONDepth}.Unmarshal(data, m.(proto.Message))
}

// report carries the progress of a long call to its stream: each step, the newest word of each, and a heartbeat when there is
// nothing new, so that neither end takes the other for dead.
func report[T any](ctx context.Context, every time.Duration, send func(*warrenv1.Progress) error, call func(context.Context, func(engine.Progress)) (T, error)) (T, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var queue []engine.Progress
	wake := make(chan struct{}, 1)
	progress := func(p engine.Progress) {
		mu.Lock()
		defer mu.Unlock()
		if n := len(queue); n > 0 && queue[n-1].Step == p.Step {
			queue[n-1] = p
		} else {
			queue = append(queue, p)
		}
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		// Here nobody else recovers.
		defer func() {
			if p := recover(); p != nil {
				r.err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
			done <- r
		}()
		r.value, r.err = call(ctx, progress)
	}()
	last := &warrenv1.Progress{}
	flush := func() error {
		mu.Lock()
		q := queue
		queue = nil
		mu.Unlock()
		for _, p := range q {
			last = &warrenv1.Progress{Step: p.Step, Message: printable(p.Message, 1<<10), Done: p.Done, Total: p.Total}
			if err := send(last); err != nil {
				return err
			}
		}
		return nil
	}
	beat := time.NewTicker(every)
	defer beat.Stop()
	var err error
	for {
		select {
		case <-wake:
			err = flush()
		case <-beat.C:
			err = send(last)
		case r := <-done:
			if err == nil {
				err = flush()
			}
			if r.err != nil {
				return r.value, r.err
			}
			return r.value, err
		}
		if err != nil {
			// The caller is gone; the engine decides what becomes of the call.
			cancel(err)
			r := <-done
			return r.value, errors.Join(r.err, context.Canceled)
		}
	}
}

// chunkWriter sends what is written to it in pieces.
type chunkWriter struct {
	ctx  context.Context
	send func([]byte) error
}

func (w chunkWriter) Write(b []byte) (int, error) {
	n := 0
	for len(b) > 0 {
		if err := w.ctx.Err(); err != nil {
			return n, err
		}
		k := min(len(b), 64<<10)
		if err := w.send(b[:k]); err != nil {
			return n, err
		}
		n, b = n+k, b[k:]
	}
	return n, nil
}

type sandboxService struct{ s *Server }

func (h sandboxService) CreateSandbox(ctx context.Context, req *connect.Request[warrenv1.CreateSandboxRequest], stream *connect.ServerStream[warrenv1.CreateSandboxResponse]) error {
	spec, err := specOf(req.Msg.GetSpec())
	if err != nil {
		return err
	}
	// Until there is a sandbox, what it is to go on from, which may be another user's.
	h.s.note(ctx, cmp.Or(spec.WorkspaceID, spec.Snapshot, spec.Template))
	sb, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.CreateSandboxResponse{Event: &warrenv1.CreateSandboxResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Sandbox, error) {
			return h.s.engine.Create(ctx, callerOf(ctx), engine.CreateRequest{Spec: spec, IdempotencyKey: req.Msg.GetIdempotencyKey()}, progress)
		})
	if err != nil {
		return err
	}
	tell(ctx, "made", string(sb.ID))
	tell(ctx, "policy", sb.Spec.Policy)
	return stream.Send(&warrenv1.CreateSandboxResponse{Event: &warrenv1.CreateSandboxResponse_Sandbox{Sandbox: sandboxTo(sb)}})
}

func (h sandboxService) GetSandbox(ctx context.Context, req *connect.Request[warrenv1.GetSandboxRequest]) (*connect.Response[warrenv1.GetSandboxResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	sb, err := h.s.engine.Get(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

func (h sandboxService) ListSandboxes(ctx context.Context, req *connect.Request[warrenv1.ListSandboxesRequest]) (*connect.Response[warrenv1.ListSandboxesResponse], error) {
	size, err := pageSize(req.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	r := engine.ListRequest{Labels: req.Msg.GetLabels(), PageSize: size, PageToken: req.Msg.GetPageToken()}
	for _, st := range req.Msg.GetStates() {
		state, ok := statesOf[st]
		if !ok {
			return nil, invalid("state %d is none of the states of a sandbox", st)
		}
		r.States = append(r.States, state)
	}
	list, next, err := h.s.engine.List(ctx, callerOf(ctx), r)
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListSandboxesResponse{NextPageToken: next}
	for _, sb := range list {
		res.Sandboxes = append(res.Sandboxes, sandboxTo(sb))
	}
	return connect.NewResponse(res), nil
}

func (h sandboxService) UpdateSandbox(ctx context.Context, req *connect.Request[warrenv1.UpdateSandboxRequest]) (*connect.Response[warrenv1.UpdateSandboxResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	r := engine.UpdateRequest{ID: m.GetId(), Name: m.Name, SetLabels: m.GetSetLabels(), RemoveLabels: m.GetRemoveLabels(), KeepWorkspace: m.KeepWorkspace, AutoResume: m.AutoResume, PrivateNetwork: m.PrivateNetwork}
	if m.GetIdleAction() != warrenv1.IdleAction_IDLE_ACTION_UNSPECIFIED {
		action, err := idleActionOf(m.GetIdleAction())
		if err != nil {
			return nil, err
		}
		r.IdleAction = &action
	}
	if m.GetTtlAction() != warrenv1.IdleAction_IDLE_ACTION_UNSPECIFIED {
		action, err := idleActionOf(m.GetTtlAction())
		if err != nil {
			return nil, err
		}
		r.TTLAction = &action
	}
	var err error
	if r.IdleTimeout, err = optionalDuration("idle_timeout", m.GetIdleTimeout()); err != nil {
		return nil, err
	}
	if r.TTL, err = optionalDuration("ttl", m.GetTtl()); err != nil {
		return nil, err
	}
	sb, err := h.s.engine.Update(ctx, callerOf(ctx), r)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.UpdateSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

func (h sandboxService) DeleteSandbox(ctx context.Context, req *connect.Request[warrenv1.DeleteSandboxRequest]) (*connect.Response[warrenv1.DeleteSandboxResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	id, _ := h.s.engine.Resolve(callerOf(ctx), m.GetId())
	err := h.s.engine.Delete(ctx, callerOf(ctx), engine.DeleteRequest{ID: m.GetId(), Key: m.GetIdempotencyKey(), AllowMissing: m.GetAllowMissing(), DeleteWorkspace: m.GetDeleteWorkspace()})
	if err != nil {
		return nil, err
	}
	h.s.pools.drop(id)
	return connect.NewResponse(&warrenv1.DeleteSandboxResponse{}), nil
}

func (h sandboxService) RestartSandbox(ctx context.Context, req *connect.Request[warrenv1.RestartSandboxRequest]) (*connect.Response[warrenv1.RestartSandboxResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	sb, err := h.s.engine.Restart(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	h.s.pools.drop(sb.ID)
	return connect.NewResponse(&warrenv1.RestartSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

func (h sandboxService) PauseSandbox(ctx context.Context, req *connect.Request[warrenv1.PauseSandboxRequest]) (*connect.Response[warrenv1.PauseSandboxResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	sb, err := h.s.engine.Pause(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	h.s.pools.drop(sb.ID)
	return connect.NewResponse(&warrenv1.PauseSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

func (h sandboxService) ResumeSandbox(ctx context.Context, req *connect.Request[warrenv1.ResumeSandboxRequest]) (*connect.Response[warrenv1.ResumeSandboxResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	sb, err := h.s.engine.Resume(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.ResumeSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

func (h sandboxService) GetStats(ctx context.Context, req *connect.Request[warrenv1.GetStatsRequest]) (*connect.Response[warrenv1.GetStatsResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	st, err := h.s.engine.Stats(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(statsTo(st)), nil
}

func (h sandboxService) WatchEvents(ctx context.Context, req *connect.Request[warrenv1.WatchEventsRequest], stream *connect.ServerStream[warrenv1.WatchEventsResponse]) error {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	if m.GetAfter() < 0 {
		return invalid("after is %d; want the sequence number of an event, or 0", m.GetAfter())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, done := make(chan *engine.Event), make(chan error, 1)
	go func() {
		var err error
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
			done <- err
		}()
		err = h.s.engine.Watch(ctx, callerOf(ctx), engine.WatchRequest{ID: m.GetId(), After: m.GetAfter(), NoFollow: m.GetNoFollow()}, func(e *engine.Event) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	beat := time.NewTicker(h.s.opts.Heartbeat)
	defer beat.Stop()
	for {
		res := &warrenv1.WatchEventsResponse{}
		select {
		case e := <-events:
			res.Event = eventTo(e)
		case <-beat.C:
		case err := <-done:
			if h.s.long.Err() != nil {
				return errDraining
			}
			return err
		}
		if err := stream.Send(res); err != nil {
			cancel()
			<-done
			return err
		}
	}
}

// errDraining asks a client to come again.
var errDraining = &warren.Error{Kind: "unavailable", Message: "the server is stopping"}

type workspaceService struct{ s *Server }

func (h workspaceService) CreateWorkspace(ctx context.Context, req *connect.Request[warrenv1.CreateWorkspaceRequest], stream *connect.ServerStream[warrenv1.CreateWorkspaceResponse]) error {
	r := engine.CreateWorkspaceRequest{Name: req.Msg.GetName(), Repo: repoSourceOf(req.Msg.GetRepo()), IdempotencyKey: req.Msg.GetIdempotencyKey()}
	ws, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.CreateWorkspaceResponse{Event: &warrenv1.CreateWorkspaceResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Workspace, error) {
			return h.s.engine.CreateWorkspace(ctx, callerOf(ctx), r, progress)
		})
	if err != nil {
		return err
	}
	return stream.Send(&warrenv1.CreateWorkspaceResponse{Event: &warrenv1.CreateWorkspaceResponse_Workspace{Workspace: workspaceTo(ws)}})
}

func (h workspaceService) GetWorkspace(ctx context.Context, req *connect.Request[warrenv1.GetWorkspaceRequest]) (*connect.Response[warrenv1.GetWorkspaceResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	ws, err := h.s.engine.GetWorkspace(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetSize())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetWorkspaceResponse{Workspace: workspaceTo(ws)}), nil
}

func (h workspaceService) ListWorkspaces(ctx context.Context, req *connect.Request[warrenv1.ListWorkspacesRequest]) (*connect.Response[warrenv1.ListWorkspacesResponse], error) {
	size, err := pageSize(req.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	list, next, err := h.s.engine.ListWorkspaces(ctx, callerOf(ctx), req.Msg.GetSize(), size, req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListWorkspacesResponse{NextPageToken: next}
	for _, ws := range list {
		res.Workspaces = append(res.Workspaces, workspaceTo(ws))
	}
	return connect.NewResponse(res), nil
}

func (h workspaceService) DeleteWorkspace(ctx context.Context, req *connect.Request[warrenv1.DeleteWorkspaceRequest]) (*connect.Response[warrenv1.DeleteWorkspaceResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.DeleteWorkspace(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetAllowMissing()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteWorkspaceResponse{}), nil
}

func (h workspaceService) CopyWorkspace(ctx context.Context, req *connect.Request[warrenv1.CopyWorkspaceRequest]) (*connect.Response[warrenv1.CopyWorkspaceResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	ws, method, err := h.s.engine.CopyWorkspace(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.CopyWorkspaceResponse{Workspace: workspaceTo(ws), Method: method}), nil
}

func (h workspaceService) MarkWorkspace(ctx context.Context, req *connect.Request[warrenv1.MarkWorkspaceRequest]) (*connect.Response[warrenv1.MarkWorkspaceResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.MarkWorkspace(ctx, callerOf(ctx), req.Msg.GetId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.MarkWorkspaceResponse{}), nil
}

func (h workspaceService) Diff(ctx context.Context, req *connect.Request[warrenv1.DiffRequest], stream *connect.ServerStream[warrenv1.DiffResponse]) error {
	h.s.note(ctx, req.Msg.GetId())
	w := chunkWriter{ctx, func(b []byte) error { return stream.Send(&warrenv1.DiffResponse{Chunk: b}) }}
	return h.s.engine.Diff(ctx, callerOf(ctx), req.Msg.GetId(), engine.DiffOptions{All: req.Msg.GetAll(), Stat: req.Msg.GetStat(), SinceMark: req.Msg.GetSinceMark()}, w)
}

func (h workspaceService) Commit(ctx context.Context, req *connect.Request[warrenv1.CommitRequest]) (*connect.Response[warrenv1.CommitResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	c, err := h.s.engine.Commit(ctx, callerOf(ctx), engine.CommitRequest{ID: m.GetId(), Message: m.GetMessage(), Branch: m.GetBranch(), Author: m.GetAuthor(), All: m.GetAll()})
	if err != nil {
		return nil, err
	}
	res := &warrenv1.CommitResponse{Commit: c.ID, Branch: c.Branch, FilesChanged: uint32(max(0, c.Files))}
	// A path of the host is of use, and of interest, only to who is on it.
	if callerOf(ctx).Operator {
		res.RepoPath = c.RepoDir
	}
	return connect.NewResponse(res), nil
}

func (h workspaceService) Push(ctx context.Context, req *connect.Request[warrenv1.PushRequest]) (*connect.Response[warrenv1.PushResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	p, err := h.s.engine.Push(ctx, callerOf(ctx), engine.PushRequest{ID: m.GetId(), Branch: m.GetBranch(), RemoteBranch: m.GetRemoteBranch(), Force: m.GetForce()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.PushResponse{Url: p.URL, Branch: p.Branch, Commit: p.Commit}), nil
}

func (h workspaceService) FormatPatch(ctx context.Context, req *connect.Request[warrenv1.FormatPatchRequest], stream *connect.ServerStream[warrenv1.FormatPatchResponse]) error {
	h.s.note(ctx, req.Msg.GetId())
	w := chunkWriter{ctx, func(b []byte) error { return stream.Send(&warrenv1.FormatPatchResponse{Chunk: b}) }}
	return h.s.engine.FormatPatch(ctx, callerOf(ctx), req.Msg.GetId(), w)
}

type repoService struct{ s *Server }

func (h repoService) FetchRepo(ctx context.Context, req *connect.Request[warrenv1.FetchRepoRequest], stream *connect.ServerStream[warrenv1.FetchRepoResponse]) error {
	r, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.FetchRepoResponse{Event: &warrenv1.FetchRepoResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Repo, error) {
			return h.s.engine.FetchRepo(ctx, callerOf(ctx), req.Msg.GetUrl(), progress)
		})
	if err != nil {
		return err
	}
	return stream.Send(&warrenv1.FetchRepoResponse{Event: &warrenv1.FetchRepoResponse_Repo{Repo: repoTo(r, callerOf(ctx))}})
}

func (h repoService) ListRepos(ctx context.Context, req *connect.Request[warrenv1.ListReposRequest]) (*connect.Response[warrenv1.ListReposResponse], error) {
	list, err := h.s.engine.ListRepos(ctx, callerOf(ctx))
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListReposResponse{}
	for _, r := range list {
		res.Repos = append(res.Repos, repoTo(r, callerOf(ctx)))
	}
	return connect.NewResponse(res), nil
}

func (h repoService) DeleteRepo(ctx context.Context, req *connect.Request[warrenv1.DeleteRepoRequest]) (*connect.Response[warrenv1.DeleteRepoResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.DeleteRepo(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetAllowMissing()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteRepoResponse{}), nil
}

type imageService struct{ s *Server }

func (h imageService) PullImage(ctx context.Context, req *connect.Request[warrenv1.PullImageRequest], stream *connect.ServerStream[warrenv1.PullImageResponse]) error {
	m := req.Msg
	img, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.PullImageResponse{Event: &warrenv1.PullImageResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Image, error) {
			return h.s.engine.PullImage(ctx, callerOf(ctx), m.GetRef(), engine.PullOptions{Name: m.GetName(), Platform: m.GetPlatform(), Insecure: m.GetInsecure(), Progress: progress})
		})
	if err != nil {
		return err
	}
	return stream.Send(&warrenv1.PullImageResponse{Event: &warrenv1.PullImageResponse_Image{Image: imageTo(img)}})
}

func (h imageService) ImportImage(ctx context.Context, stream *connect.ClientStream[warrenv1.ImportImageRequest]) (*connect.Response[warrenv1.ImportImageResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, invalid("an import begins with a message that holds the name")
	}
	img, err := h.s.engine.ImportImage(ctx, callerOf(ctx), stream.Msg().GetName(), &importReader{stream: stream, rest: stream.Msg().GetChunk()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.ImportImageResponse{Image: imageTo(img)}), nil
}

// importReader reads the chunks of an import. A stream that broke off is not a whole archive.
type importReader struct {
	stream *connect.ClientStream[warrenv1.ImportImageRequest]
	rest   []byte
}

func (r *importReader) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		if !r.stream.Receive() {
			if err := r.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		r.rest = r.stream.Msg().GetChunk()
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (h imageService) BootstrapImage(ctx context.Context, req *connect.Request[warrenv1.BootstrapImageRequest], stream *connect.ServerStream[warrenv1.BootstrapImageResponse]) error {
	m := req.Msg
	img, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.BootstrapImageResponse{Event: &warrenv1.BootstrapImageResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Image, error) {
			return h.s.engine.BootstrapImage(ctx, callerOf(ctx), engine.BootstrapOptions{Name: m.GetName(), Distribution: m.GetDistribution(), Release: m.GetRelease(), Packages: m.GetPackages(), Progress: progress})
		})
	if err != nil {
		return err
	}
	return stream.Send(&warrenv1.BootstrapImageResponse{Event: &warrenv1.BootstrapImageResponse_Image{Image: imageTo(img)}})
}

func (h imageService) ListImages(ctx context.Context, req *connect.Request[warrenv1.ListImagesRequest]) (*connect.Response[warrenv1.ListImagesResponse], error) {
	list, err := h.s.engine.ListImages(ctx, callerOf(ctx))
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListImagesResponse{}
	for _, img := range list {
		res.Images = append(res.Images, imageTo(img))
	}
	return connect.NewResponse(res), nil
}

func (h imageService) GetImage(ctx context.Context, req *connect.Request[warrenv1.GetImageRequest]) (*connect.Response[warrenv1.GetImageResponse], error) {
	h.s.note(ctx, req.Msg.GetName())
	img, err := h.s.engine.GetImage(ctx, callerOf(ctx), req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetImageResponse{Image: imageTo(img)}), nil
}

func (h imageService) DeleteImage(ctx context.Context, req *connect.Request[warrenv1.DeleteImageRequest]) (*connect.Response[warrenv1.DeleteImageResponse], error) {
	h.s.note(ctx, req.Msg.GetName())
	if err := h.s.engine.DeleteImage(ctx, callerOf(ctx), req.Msg.GetName(), req.Msg.GetAllowMissing()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteImageResponse{}), nil
}

type systemService struct{ s *Server }

func (h systemService) GetVersion(ctx context.Context, req *connect.Request[warrenv1.GetVersionRequest]) (*connect.Response[warrenv1.GetVersionResponse], error) {
	return connect.NewResponse(h.s.version()), nil
}

func (h systemService) Doctor(ctx context.Context, req *connect.Request[warrenv1.DoctorRequest]) (*connect.Response[warrenv1.DoctorResponse], error) {
	// Findings about the host name its paths, versions and settings.
	if !callerOf(ctx).Operator {
		return nil, &warren.Error{Kind: "denied", Op: "doctor", Message: "only the server's operator may look at its host"}
	}
	res := &warrenv1.DoctorResponse{}
	for _, c := range h.s.engine.Doctor(ctx) {
		res.Checks = append(res.Checks, &warrenv1.DoctorResponse_Check{Name: c.Name, Status: c.Status, Message: c.Message, Hint: c.Hint})
	}
	return connect.NewResponse(res), nil
}

func (h systemService) CreateToken(ctx context.Context, req *connect.Request[warrenv1.CreateTokenRequest]) (*connect.Response[warrenv1.CreateTokenResponse], error) {
	ttl, err := duration("ttl", req.Msg.GetTtl())
	if err != nil {
		return nil, err
	}
	id, token, err := h.s.engine.CreateToken(ctx, callerOf(ctx), req.Msg.GetUser(), req.Msg.GetDescription(), ttl)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.CreateTokenResponse{Id: id, Token: token}), nil
}

func (h systemService) ListTokens(ctx context.Context, req *connect.Request[warrenv1.ListTokensRequest]) (*connect.Response[warrenv1.ListTokensResponse], error) {
	list, err := h.s.engine.ListTokens(ctx, callerOf(ctx))
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListTokensResponse{}
	for _, t := range list {
		res.Tokens = append(res.Tokens, tokenTo(&t))
	}
	return connect.NewResponse(res), nil
}

func (h systemService) DeleteToken(ctx context.Context, req *connect.Request[warrenv1.DeleteTokenRequest]) (*connect.Response[warrenv1.DeleteTokenResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.DeleteToken(ctx, callerOf(ctx), req.Msg.GetId()); err != nil {
		return nil, err
	}
	h.s.tokens.check(h.s.base)
	return connect.NewResponse(&warrenv1.DeleteTokenResponse{}), nil
}

// note tells the log and the record which sandbox, or what else, a call is about.
func (s *Server) note(ctx context.Context, ref string) { requestOf(ctx).sandbox = ref }

// tell puts more about a call on record than what it was about: what it made or changed.
func tell(ctx context.Context, key, value string) {
	r := requestOf(ctx)
	if r.told == nil {
		r.told = map[string]string{}
	}
	r.told[key] = value
}
