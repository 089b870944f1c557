-- The private network of its owner's that a sandbox is in, empty for none.
ALTER TABLE sandboxes ADD COLUMN network TEXT NOT NULL DEFAULT '';
