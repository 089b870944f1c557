-- Which ports of a sandbox may be looked at from outside, and how; NULL until somebody says so.
ALTER TABLE sandboxes ADD COLUMN previews TEXT;
