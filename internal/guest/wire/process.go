package wire

import "time"

// Messages of process.Process; proto/e2b/process/process.proto says what they mean.
type (
	// PTYSize is the size of a terminal.
	PTYSize struct {
		Cols uint32 `json:"cols"`
		Rows uint32 `json:"rows"`
	}
	// PTY asks for a terminal.
	PTY struct {
		Size *PTYSize `json:"size"`
	}
	// ProcessConfig is what to run.
	ProcessConfig struct {
		Cmd  string            `json:"cmd"`
		Args []string          `json:"args"`
		Envs map[string]string `json:"envs"`
		Cwd  *string           `json:"cwd"`
	}
	// ListRequest of Process.List.
	ListRequest struct{}
	// ProcessInfo is one running process.
	ProcessInfo struct {
		Config *ProcessConfig `json:"config"`
		PID    uint32         `json:"pid"`
		Tag    *string        `json:"tag"`
	}
	// ListResponse of Process.List.
	ListResponse struct {
		Processes []ProcessInfo `json:"processes"`
	}
	// StartRequest of Process.Start.
	StartRequest struct {
		Process *ProcessConfig `json:"process"`
		PTY     *PTY           `json:"pty"`
		Tag     *string        `json:"tag"`
		Stdin   *bool          `json:"stdin"`
	}
	// UpdateRequest of Process.Update.
	UpdateRequest struct {
		Process *ProcessSelector `json:"process"`
		PTY     *PTY             `json:"pty"`
	}
	// StartEvent is the first event of a process.
	StartEvent struct {
		PID uint32 `json:"pid"`
	}
	// DataEvent carries output.
	DataEvent struct {
		Stdout []byte `json:"stdout" oneof:"output"`
		Stderr []byte `json:"stderr" oneof:"output"`
		PTY    []byte `json:"pty" oneof:"output"`
	}
	// EndEvent is the last event of a process.
	EndEvent struct {
		ExitCode int32   `json:"exitCode"`
		Exited   bool    `json:"exited"`
		Status   string  `json:"status"`
		Error    *string `json:"error"`
	}
	// ProcessEvent is one of the events of a process.
	ProcessEvent struct {
		Start     *StartEvent `json:"start" oneof:"event"`
		Data      *DataEvent  `json:"data" oneof:"event"`
		End       *EndEvent   `json:"end" oneof:"event"`
		Keepalive *Empty      `json:"keepalive" oneof:"event"`
	}
	// StartResponse of Process.Start; Process.Connect answers the same.
	StartResponse struct {
		Event *ProcessEvent `json:"event"`
	}
	// ConnectRequest of Process.Connect; CloseStdin takes the same.
	ConnectRequest struct {
		Process *ProcessSelector `json:"process"`
	}
	// ProcessInput is bytes for a process.
	ProcessInput struct {
		Stdin []byte `json:"stdin" oneof:"input"`
		PTY   []byte `json:"pty" oneof:"input"`
	}
	// SendInputRequest of Process.SendInput.
	SendInputRequest struct {
		Process *ProcessSelector `json:"process"`
		Input   *ProcessInput    `json:"input"`
	}
	// StreamInputData is one piece of streamed input.
	StreamInputData struct {
		Input *ProcessInput `json:"input"`
	}
	// StreamInputRequest of Process.StreamInput: first Start, then the others.
	StreamInputRequest struct {
		Start     *ConnectRequest  `json:"start" oneof:"event"`
		Data      *StreamInputData `json:"data" oneof:"event"`
		Keepalive *Empty           `json:"keepalive" oneof:"event"`
	}
	// SendSignalRequest of Process.SendSignal.
	SendSignalRequest struct {
		Process *ProcessSelector `json:"process"`
		Signal  Signal           `json:"signal"`
	}
	// ProcessSelector names a process by one of its two names.
	ProcessSelector struct {
		PID *uint32 `json:"pid" oneof:"selector"`
		Tag *string `json:"tag" oneof:"selector"`
	}
	// Empty is a message without fields.
	Empty struct{}
)

// Signal is a signal that Process.SendSignal knows, with its number on Linux.
type Signal int32

// The signals of Process.SendSignal.
const (
	SignalUnspecified Signal = 0
	SignalKill        Signal = 9
	SignalTerm        Signal = 15
)

func (Signal) names() map[int32]string {
	return map[int32]string{0: "SIGNAL_UNSPECIFIED", 9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}
}

// Messages of filesystem.Filesystem; proto/e2b/filesystem/filesystem.proto says what they mean.
type (
	// MoveRequest of Filesystem.Move.
	MoveRequest struct {
		Source      string `json:"source"`
		Destination string `json:"destination"`
	}
	// PathRequest is the request of Stat, MakeDir and Remove.
	PathRequest struct {
		Path string `json:"path"`
	}
	// EntryResponse is the response of Stat, MakeDir and Move.
	EntryResponse struct {
		Entry *EntryInfo `json:"entry"`
	}
	// EntryInfo describes a file.
	EntryInfo struct {
		Name          string            `json:"name"`
		Type          FileType          `json:"type"`
		Path          string            `json:"path"`
		Size          int64             `json:"size"`
		Mode          uint32            `json:"mode"`
		Permissions   string            `json:"permissions"`
		Owner         string            `json:"owner"`
		Group         string            `json:"group"`
		ModifiedTime  *time.Time        `json:"modifiedTime"`
		SymlinkTarget *string           `json:"symlinkTarget"`
		Metadata      map[string]string `json:"metadata"`
	}
	// ListDirRequest of Filesystem.ListDir.
	ListDirRequest struct {
		Path  string `json:"path"`
		Depth uint32 `json:"depth"`
	}
	// ListDirResponse of Filesystem.ListDir.
	ListDirResponse struct {
		Entries []EntryInfo `json:"entries"`
	}
	// WatchDirRequest of Filesystem.WatchDir and CreateWatcher.
	WatchDirRequest struct {
		Path               string `json:"path"`
		Recursive          bool   `json:"recursive"`
		IncludeEntry       bool   `json:"includeEntry"`
		AllowNetworkMounts bool   `json:"allowNetworkMounts"`
	}
	// FilesystemEvent is one change of a watched directory.
	FilesystemEvent struct {
		Name  string     `json:"name"`
		Type  EventType  `json:"type"`
		Entry *EntryInfo `json:"entry"`
	}
	// WatchDirResponse of Filesystem.WatchDir.
	WatchDirResponse struct {
		Start      *Empty           `json:"start" oneof:"event"`
		Filesystem *FilesystemEvent `json:"filesystem" oneof:"event"`
		Keepalive  *Empty           `json:"keepalive" oneof:"event"`
	}
	// CreateWatcherResponse of Filesystem.CreateWatcher; GetWatcherEvents and RemoveWatcher take the same.
	CreateWatcherResponse struct {
		WatcherID string `json:"watcherId"`
	}
	// GetWatcherEventsResponse of Filesystem.GetWatcherEvents.
	GetWatcherEventsResponse struct {
		Events []FilesystemEvent `json:"events"`
	}
)

// FileType is the type of a file.
type FileType int32

// The types of files.
const (
	FileTypeUnspecified FileType = iota
	FileTypeFile
	FileTypeDirectory
	FileTypeSymlink
)

func (FileType) names() map[int32]string {
	return map[int32]string{0: "FILE_TYPE_UNSPECIFIED", 1: "FILE_TYPE_FILE", 2: "FILE_TYPE_DIRECTORY", 3: "FILE_TYPE_SYMLINK"}
}

// EventType is the type of a change in a directory.
type EventType int32

// The types of changes.
const (
	EventUnspecified EventType = iota
	EventCreate
	EventWrite
	EventRemove
	EventRename
	EventChmod
)

func (EventType) names() map[int32]string {
	return map[int32]string{0: "EVENT_TYPE_UNSPECIFIED", 1: "EVENT_TYPE_CREATE", 2: "EVENT_TYPE_WRITE", 3: "EVENT_TYPE_REMOVE",
		4: "EVENT_TYPE_RENAME", 5: "EVENT_TYPE_CHMOD"}
}
