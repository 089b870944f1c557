-- A template is a name for a snapshot. recipe is what it was built from, which the server only keeps.
CREATE TABLE templates (
	id          TEXT PRIMARY KEY,
	name        TEXT NOT NULL,
	owner       TEXT NOT NULL,
	snapshot_id TEXT NOT NULL,
	recipe      TEXT NOT NULL,
	idle        INTEGER NOT NULL,
	version     INTEGER NOT NULL,
	created     INTEGER NOT NULL,
	updated     INTEGER NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX templates_name ON templates (owner, name);
