-- A secret is kept sealed: whoever has the database without the key has nothing.
CREATE TABLE secrets (
	name    TEXT PRIMARY KEY,
	sealed  TEXT NOT NULL,
	version INTEGER NOT NULL,
	created INTEGER NOT NULL,
	updated INTEGER NOT NULL
) WITHOUT ROWID;
