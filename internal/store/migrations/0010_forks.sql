-- The fork that a sandbox is a child of while not all children of it are there and only all or none are wanted; else empty.
ALTER TABLE sandboxes ADD COLUMN fork_id TEXT NOT NULL DEFAULT '';
