-- What the time to live does, empty for delete; how long it is when a resume begins it anew; and when the longest life of a sandbox is over, on
-- the engine's own time line, 0 for never.
ALTER TABLE sandboxes ADD COLUMN ttl INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN ttl_action TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN life_ends INTEGER NOT NULL DEFAULT 0;
