-- How far each record that is chained by hash was seen to go, kept where whoever removes the record does not also remove this.
CREATE TABLE heads (
	record TEXT PRIMARY KEY,
	seq    INTEGER NOT NULL,
	hash   TEXT NOT NULL,
	seen   INTEGER NOT NULL
) WITHOUT ROWID;
