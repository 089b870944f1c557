-- What an idle timeout does, empty for what the driver can do best; whether a call resumes a paused sandbox; and why one is paused.
ALTER TABLE sandboxes ADD COLUMN idle_action TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN no_auto_resume INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN pause_reason TEXT NOT NULL DEFAULT '';
-- Those that were made to be removed stay so.
UPDATE sandboxes SET idle_action = 'delete' WHERE idle > 0;
UPDATE sandboxes SET pause_reason = 'asked' WHERE state IN ('paused', 'pausing');
