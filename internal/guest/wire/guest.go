package wire

import "time"

// Messages of warren.guest.v1.GuestService; proto/warren/guest/v1/guest.proto says what they mean.
type (
	// AttachRequest of Attach.
	AttachRequest struct {
		Process  *ProcessSelector `json:"process"`
		FromSeq  int64            `json:"fromSeq"`
		NoFollow bool             `json:"noFollow"`
	}
	// AttachResponse of Attach.
	AttachResponse struct {
		Start      *ProcessStatus `json:"start" oneof:"event"`
		Output     *Output        `json:"output" oneof:"event"`
		End        *ProcessStatus `json:"end" oneof:"event"`
		Keepalive  *Empty         `json:"keepalive" oneof:"event"`
		LostBefore *int64         `json:"lostBefore" oneof:"event"`
	}
	// Output is a piece of output with its place.
	Output struct {
		Seq    int64  `json:"seq"`
		Stdout []byte `json:"stdout" oneof:"data"`
		Stderr []byte `json:"stderr" oneof:"data"`
		PTY    []byte `json:"pty" oneof:"data"`
	}
	// ProcessStatus is all that is known of a process.
	ProcessStatus struct {
		PID      uint32     `json:"pid"`
		Tag      string     `json:"tag"`
		Cmd      string     `json:"cmd"`
		Args     []string   `json:"args"`
		Cwd      string     `json:"cwd"`
		User     string     `json:"user"`
		PTY      bool       `json:"pty"`
		Running  bool       `json:"running"`
		ExitCode int32      `json:"exitCode"`
		Status   string     `json:"status"`
		Started  *time.Time `json:"started"`
		Ended    *time.Time `json:"ended"`
		Seq      int64      `json:"seq"`
		Rollback string     `json:"rollback"`
		// RollbackSeq is where the output goes on since then.
		RollbackSeq int64 `json:"rollbackSeq"`
	}
	// ListProcessesRequest of ListProcesses.
	ListProcessesRequest struct {
		All bool `json:"all"`
	}
	// ListProcessesResponse of ListProcesses.
	ListProcessesResponse struct {
		Processes []ProcessStatus `json:"processes"`
	}
	// SignalRequest of Signal.
	SignalRequest struct {
		Process *ProcessSelector `json:"process"`
		Signal  int32            `json:"signal"`
		Group   bool             `json:"group"`
	}
	// SearchRequest of Search.
	SearchRequest struct {
		Path         string   `json:"path"`
		Pattern      string   `json:"pattern"`
		Fixed        bool     `json:"fixed"`
		IgnoreCase   bool     `json:"ignoreCase"`
		Include      []string `json:"include"`
		Exclude      []string `json:"exclude"`
		All          bool     `json:"all"`
		MaxMatches   uint32   `json:"maxMatches"`
		MaxFileBytes int64    `json:"maxFileBytes"`
		Context      uint32   `json:"context"`
	}
	// SearchResponse of Search.
	SearchResponse struct {
		Match   *Match         `json:"match" oneof:"event"`
		Summary *SearchSummary `json:"summary" oneof:"event"`
	}
	// Match is one matching line.
	Match struct {
		Path   string   `json:"path"`
		Line   uint32   `json:"line"`
		Column uint32   `json:"column"`
		Text   string   `json:"text"`
		Before []string `json:"before"`
		After  []string `json:"after"`
	}
	// SearchSummary ends a search.
	SearchSummary struct {
		FilesSearched uint32 `json:"filesSearched"`
		FilesSkipped  uint32 `json:"filesSkipped"`
		Matches       uint32 `json:"matches"`
		Truncated     bool   `json:"truncated"`
	}
	// ReplaceRequest of Replace.
	ReplaceRequest struct {
		Path        string   `json:"path"`
		Pattern     string   `json:"pattern"`
		Replacement string   `json:"replacement"`
		Fixed       bool     `json:"fixed"`
		IgnoreCase  bool     `json:"ignoreCase"`
		Include     []string `json:"include"`
		Exclude     []string `json:"exclude"`
		All         bool     `json:"all"`
		DryRun      bool     `json:"dryRun"`
		MaxFiles    uint32   `json:"maxFiles"`
	}
	// ReplacedFile is one file of a ReplaceResponse.
	ReplacedFile struct {
		Path         string `json:"path"`
		Replacements uint32 `json:"replacements"`
		Error        string `json:"error"`
	}
	// ReplaceResponse of Replace.
	ReplaceResponse struct {
		Files        []ReplacedFile `json:"files"`
		Replacements uint32         `json:"replacements"`
	}
	// OpenSessionRequest of OpenSession.
	OpenSessionRequest struct {
		Cwd  string            `json:"cwd"`
		Envs map[string]string `json:"envs"`
		ID   string            `json:"id"`
	}
	// OpenSessionResponse of OpenSession.
	OpenSessionResponse struct {
		ID  string `json:"id"`
		PID uint32 `json:"pid"`
	}
	// RunInSessionRequest of RunInSession.
	RunInSessionRequest struct {
		ID        string `json:"id"`
		Command   string `json:"command"`
		TimeoutMS int64  `json:"timeoutMs"`
	}
	// SessionEnd is the end of one command.
	SessionEnd struct {
		ExitCode     int32  `json:"exitCode"`
		Cwd          string `json:"cwd"`
		TimedOut     bool   `json:"timedOut"`
		SessionEnded bool   `json:"sessionEnded"`
	}
	// RunInSessionResponse of RunInSession.
	RunInSessionResponse struct {
		Stdout    []byte      `json:"stdout" oneof:"event"`
		Stderr    []byte      `json:"stderr" oneof:"event"`
		End       *SessionEnd `json:"end" oneof:"event"`
		Keepalive *Empty      `json:"keepalive" oneof:"event"`
	}
	// CloseSessionRequest of CloseSession.
	CloseSessionRequest struct {
		ID string `json:"id"`
	}
	// SessionInfo is one open session.
	SessionInfo struct {
		ID   string `json:"id"`
		PID  uint32 `json:"pid"`
		User string `json:"user"`
		Busy bool   `json:"busy"`
	}
	// ListSessionsResponse of ListSessions.
	ListSessionsResponse struct {
		Sessions []SessionInfo `json:"sessions"`
	}
	// WatchPortsRequest of WatchPorts.
	WatchPortsRequest struct {
		NoFollow bool `json:"noFollow"`
	}
	// Port is one TCP port that listens.
	Port struct {
		Port    uint32 `json:"port"`
		Address string `json:"address"`
		PID     uint32 `json:"pid"`
		Program string `json:"program"`
	}
	// WatchPortsResponse of WatchPorts.
	WatchPortsResponse struct {
		Open      *Port  `json:"open" oneof:"event"`
		Close     *Port  `json:"close" oneof:"event"`
		Keepalive *Empty `json:"keepalive" oneof:"event"`
		Ready     *Empty `json:"ready" oneof:"event"`
	}
	// WatchLifecycleRequest of WatchLifecycle.
	WatchLifecycleRequest struct {
		NoFollow bool `json:"noFollow"`
	}
	// LifecycleEvent is one turn in the life of a sandbox.
	LifecycleEvent struct {
		Event      string     `json:"event"`
		SandboxID  string     `json:"sandboxId"`
		ParentID   string     `json:"parentId"`
		Generation string     `json:"generation"`
		Time       *time.Time `json:"time"`
	}
	// WatchLifecycleResponse of WatchLifecycle.
	WatchLifecycleResponse struct {
		Current   *LifecycleEvent `json:"current" oneof:"event"`
		Happened  *LifecycleEvent `json:"happened" oneof:"event"`
		Keepalive *Empty          `json:"keepalive" oneof:"event"`
	}
	// InitAnswer answers /init when hooks were run; it is no message of the service.
	InitAnswer struct {
		Hooks []HookResult `json:"hooks"`
	}
	// HookResult is how one hook ended.
	HookResult struct {
		Hook   string `json:"hook"`
		OK     bool   `json:"ok"`
		Status string `json:"status"`
		Millis int32  `json:"millis"`
	}
	// Service is a program that the guest keeps going.
	Service struct {
		Name    string            `json:"name"`
		Command []string          `json:"command"`
		User    string            `json:"user"`
		Dir     string            `json:"dir"`
		Env     map[string]string `json:"env"`
		Port    uint32            `json:"port"`
		Check   *ServiceCheck     `json:"check"`
		Restart string            `json:"restart"`
	}
	// ServiceCheck asks whether a service is ready.
	ServiceCheck struct {
		HTTPPath   string   `json:"httpPath"`
		TCP        bool     `json:"tcp"`
		Command    []string `json:"command"`
		IntervalMS int64    `json:"intervalMs"`
		TimeoutMS  int64    `json:"timeoutMs"`
		Retries    uint32   `json:"retries"`
	}
	// ServiceStatus is how a service does.
	ServiceStatus struct {
		Service  *Service   `json:"service"`
		State    string     `json:"state"`
		PID      uint32     `json:"pid"`
		Restarts uint32     `json:"restarts"`
		ExitCode int32      `json:"exitCode"`
		Message  string     `json:"message"`
		Since    *time.Time `json:"since"`
	}
	// PutServicesRequest of PutServices.
	PutServicesRequest struct {
		Services []Service `json:"services"`
	}
	// ListServicesRequest of ListServices.
	ListServicesRequest struct {
		WaitMS int64 `json:"waitMs"`
	}
	// ListServicesResponse of ListServices.
	ListServicesResponse struct {
		Services []ServiceStatus `json:"services"`
	}
	// ControlServiceRequest of ControlService.
	ControlServiceRequest struct {
		Name   string `json:"name"`
		Action string `json:"action"`
	}
)
