package server

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/engine"
)

// Engine is what the server needs of *engine.Engine. Each call names its caller; the engine decides what that caller may
// see and do. References are ids, names or unique prefixes.
type Engine interface {
	sandboxes
	workspaces
	reposAndImages
	system
}

type sandboxes interface {
	Create(ctx context.Context, c engine.Caller, r engine.CreateRequest, progress func(engine.Progress)) (*engine.Sandbox, error)
	Get(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error)
	List(ctx context.Context, c engine.Caller, r engine.ListRequest) ([]*engine.Sandbox, string, error)
	Update(ctx context.Context, c engine.Caller, r engine.UpdateRequest) (*engine.Sandbox, error)
	Delete(ctx context.Context, c engine.Caller, r engine.DeleteRequest) error
	Restart(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error)
	Pause(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error)
	Resume(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error)
	Fork(ctx context.Context, c engine.Caller, r engine.ForkRequest, progress func(engine.Progress)) (*engine.ForkResult, error)
	Rollback(ctx context.Context, c engine.Caller, ref, snapshot string) (*engine.Sandbox, error)
	Snapshot(ctx context.Context, c engine.Caller, r engine.SnapshotRequest, progress func(engine.Progress)) (*engine.Snapshot, error)
	GetSnapshot(ctx context.Context, c engine.Caller, ref string, size bool) (*engine.Snapshot, error)
	ListSnapshots(ctx context.Context, c engine.Caller, sandbox string, size bool, pageSize int, token string) ([]*engine.Snapshot, string, error)
	DeleteSnapshot(ctx context.Context, c engine.Caller, ref string, allowMissing bool) error
	PutTemplate(ctx context.Context, c engine.Caller, r engine.TemplateRequest) (*engine.Template, warren.SnapshotID, error)
	GetTemplate(ctx context.Context, c engine.Caller, ref string) (*engine.Template, error)
	ListTemplates(ctx context.Context, c engine.Caller) ([]*engine.Template, error)
	DeleteTemplate(ctx context.Context, c engine.Caller, ref string, allowMissing bool) error
	Flows(ctx context.Context, c engine.Caller, r engine.WatchRequest, fn func(*engine.Event) error) error
	VerifyFlows(ctx context.Context, c engine.Caller, q engine.VerifyRequest) (*engine.FlowReport, error)
	Policies() ([]engine.PolicyInfo, error)
	Policy(name string) (engine.PolicyInfo, error)
	SetSecret(ctx context.Context, c engine.Caller, name string, value []byte) (engine.SecretInfo, error)
	Secrets(c engine.Caller) ([]engine.SecretInfo, error)
	DeleteSecret(ctx context.Context, c engine.Caller, name string) error
	CheckPolicy(name string, source []byte) ([]engine.PolicyFinding, int, error)
	DescribePolicy(name string, source []byte) []engine.PolicyStep
	ExplainSandbox(ctx context.Context, c engine.Caller, ref, target string) (*engine.PolicyAnswer, error)
	ExplainPolicy(name, target string) (*engine.PolicyAnswer, error)
	ExplainSource(name string, source []byte, target string) (*engine.PolicyAnswer, error)
	Stats(ctx context.Context, c engine.Caller, ref string) (*engine.Stats, error)
	Watch(ctx context.Context, c engine.Caller, r engine.WatchRequest, yield func(*engine.Event) error) error
	Resolve(c engine.Caller, ref string) (warren.SandboxID, error)
	SetPreview(ctx context.Context, c engine.Caller, r engine.PreviewRequest) (*engine.Preview, error)

	// Hold begins a use of a sandbox, which keeps it from its idle timeout until it has ended. A connection of
	// Dial is a use; one of DialPooled is none, and serves requests that hold the sandbox themselves.
	Hold(ctx context.Context, c engine.Caller, ref string) (warren.SandboxID, engine.Use, error)
	Dial(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error)
	DialPooled(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error)
	// MarkFirstCommand notes when the first command of a sandbox has been answered; later calls do nothing.
	MarkFirstCommand(ctx context.Context, id warren.SandboxID) error
	// AccessToken is what the guest of a sandbox asks for.
	AccessToken(c engine.Caller, ref string) (string, error)
}

type workspaces interface {
	CreateWorkspace(ctx context.Context, c engine.Caller, r engine.CreateWorkspaceRequest, progress func(engine.Progress)) (*engine.Workspace, error)
	GetWorkspace(ctx context.Context, c engine.Caller, ref string, size bool) (*engine.Workspace, error)
	ListWorkspaces(ctx context.Context, c engine.Caller, size bool, pageSize int, pageToken string) ([]*engine.Workspace, string, error)
	DeleteWorkspace(ctx context.Context, c engine.Caller, ref string, allowMissing bool) error
	CopyWorkspace(ctx context.Context, c engine.Caller, ref, name string) (*engine.Workspace, string, error)
	MarkWorkspace(ctx context.Context, c engine.Caller, ref string) error
	Diff(ctx context.Context, c engine.Caller, ref string, o engine.DiffOptions, w io.Writer) error
	Commit(ctx context.Context, c engine.Caller, r engine.CommitRequest) (*engine.Commit, error)
	Push(ctx context.Context, c engine.Caller, r engine.PushRequest) (*engine.PushResult, error)
	FormatPatch(ctx context.Context, c engine.Caller, ref string, w io.Writer) error
}

type reposAndImages interface {
	FetchRepo(ctx context.Context, c engine.Caller, url string, progress func(engine.Progress)) (*engine.Repo, error)
	ListRepos(ctx context.Context, c engine.Caller) ([]*engine.Repo, error)
	DeleteRepo(ctx context.Context, c engine.Caller, idOrURL string, allowMissing bool) error
	PullImage(ctx context.Context, c engine.Caller, ref string, o engine.PullOptions) (*engine.Image, error)
	ImportImage(ctx context.Context, c engine.Caller, name string, r io.Reader) (*engine.Image, error)
	BootstrapImage(ctx context.Context, c engine.Caller, o engine.BootstrapOptions) (*engine.Image, error)
	ListImages(ctx context.Context, c engine.Caller) ([]*engine.Image, error)
	GetImage(ctx context.Context, c engine.Caller, name string) (*engine.Image, error)
	DeleteImage(ctx context.Context, c engine.Caller, name string, allowMissing bool) error
}

type system interface {
	Instance() string
	Drivers() map[string]driver.Info
	Doctor(ctx context.Context) []driver.Check
	// Authenticate returns whom a token acts as; one that is unknown or has expired gives warren.ErrDenied.
	Authenticate(ctx context.Context, token string) (engine.Caller, error)
	CreateToken(ctx context.Context, c engine.Caller, user, description string, ttl time.Duration) (id, token string, err error)
	ListTokens(ctx context.Context, c engine.Caller) ([]engine.Token, error)
	DeleteToken(ctx context.Context, c engine.Caller, id string) error
}
