-- Where a sandbox stands in the tree of snapshots, and the sandbox that it was forked from.
ALTER TABLE sandboxes ADD COLUMN snapshot_id TEXT;
ALTER TABLE sandboxes ADD COLUMN source_id TEXT;

-- files_id names the copy of the workspace among the workspaces on disk; parent_id the snapshot before it, if it is still
-- there. spec and source are what the sandbox and its workspace had.
CREATE TABLE snapshots (
	num          INTEGER PRIMARY KEY AUTOINCREMENT,
	id           TEXT NOT NULL UNIQUE,
	name         TEXT,
	owner        TEXT NOT NULL,
	state        TEXT NOT NULL,
	kind         TEXT NOT NULL,
	sandbox_id   TEXT NOT NULL,
	sandbox_name TEXT,
	parent_id    TEXT,
	driver       TEXT NOT NULL,
	image        TEXT NOT NULL,
	image_digest TEXT NOT NULL,
	files_id     TEXT NOT NULL,
	repo_id      TEXT NOT NULL,
	cpu_millis   INTEGER NOT NULL,
	memory       INTEGER NOT NULL,
	disk         INTEGER NOT NULL,
	pids         INTEGER NOT NULL,
	created      INTEGER NOT NULL,
	memory_size  INTEGER NOT NULL,
	files_size   INTEGER NOT NULL,
	transient    INTEGER NOT NULL,
	source       TEXT NOT NULL,
	spec         TEXT NOT NULL
);
CREATE UNIQUE INDEX snapshots_name ON snapshots (owner, name) WHERE name IS NOT NULL;
