-- What is beside the workspace in a snapshot of files: "sha256:" and the checksum of its layer, "none" for no layer, empty where an
-- older version did not write it down. The size is memory_size.
ALTER TABLE snapshots ADD COLUMN root_sum TEXT NOT NULL DEFAULT '';
