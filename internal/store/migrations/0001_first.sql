CREATE TABLE meta (
	key   TEXT PRIMARY KEY,
	value TEXT NOT NULL
) WITHOUT ROWID;

-- num orders sandboxes by creation and is the cursor of lists; AUTOINCREMENT so that it is never used again.
CREATE TABLE sandboxes (
	num          INTEGER PRIMARY KEY AUTOINCREMENT,
	id           TEXT NOT NULL UNIQUE,
	name         TEXT,
	owner        TEXT NOT NULL,
	state        TEXT NOT NULL,
	generation   INTEGER NOT NULL,
	driver       TEXT NOT NULL,
	image        TEXT NOT NULL,
	image_digest TEXT NOT NULL,
	workspace_id TEXT NOT NULL,
	cpu_millis   INTEGER NOT NULL,
	memory       INTEGER NOT NULL,
	disk         INTEGER NOT NULL,
	pids         INTEGER NOT NULL,
	created      INTEGER NOT NULL,
	last_active  INTEGER NOT NULL,
	expires      INTEGER NOT NULL,
	idle         INTEGER NOT NULL,
	restart      TEXT NOT NULL,
	drop_workspace INTEGER NOT NULL,
	access_token TEXT NOT NULL,
	labels       TEXT,
	failure      TEXT,
	spec         TEXT NOT NULL,
	timing       TEXT
);
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (owner, name) WHERE name IS NOT NULL;

CREATE TABLE workspaces (
	num       INTEGER PRIMARY KEY AUTOINCREMENT,
	id        TEXT NOT NULL UNIQUE,
	name      TEXT,
	owner     TEXT NOT NULL,
	state     TEXT NOT NULL,
	repo_id   TEXT NOT NULL,
	created   INTEGER NOT NULL,
	keep      INTEGER NOT NULL,
	source    TEXT NOT NULL
);
CREATE UNIQUE INDEX workspaces_name ON workspaces (owner, name) WHERE name IS NOT NULL;

CREATE TABLE keys (
	owner       TEXT NOT NULL,
	key         TEXT NOT NULL,
	fingerprint TEXT NOT NULL,
	object      TEXT NOT NULL,
	created     INTEGER NOT NULL,
	PRIMARY KEY (owner, key)
);

CREATE TABLE events (
	seq          INTEGER PRIMARY KEY AUTOINCREMENT,
	time         INTEGER NOT NULL,
	owner        TEXT NOT NULL,
	actor        TEXT NOT NULL,
	action       TEXT NOT NULL,
	sandbox_id   TEXT,
	workspace_id TEXT,
	message      TEXT,
	fields       TEXT
);
CREATE TABLE tokens (
	id          TEXT PRIMARY KEY,
	user        TEXT NOT NULL,
	description TEXT NOT NULL,
	hash        BLOB NOT NULL UNIQUE,
	created     INTEGER NOT NULL,
	expires     INTEGER NOT NULL,
	last_used   INTEGER NOT NULL
) WITHOUT ROWID;
