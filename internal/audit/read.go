package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// followEvery is how often Follow looks for more.
const followEvery = 100 * time.Millisecond

// Read calls fn with each record of the log in dir whose number is greater than after, in order, up to the last whole one;
// the log may be written meanwhile. Records that were dropped are passed over. A line that is no sound record is passed
// over as well, and Read returns the first such one as a *[Bad] at the end; it does not check the chain, which is
// [Verify]'s. An error of fn ends the reading and is returned.
func Read(dir string, after int64, fn func(Record) error) error {
	c := cursor{dir: dir, after: after, fn: fn}
	defer c.close()
	if err := c.drain(); err != nil {
		return err
	}
	if c.bad != nil {
		return c.bad
	}
	return nil
}

// Follow is Read that goes on with records as they come, within 100 ms, until ctx ends or fn returns an error. A directory that
// has no log yet is waited for. A line that is no sound record ends it with a *[Bad].
func Follow(ctx context.Context, dir string, after int64, fn func(Record) error) error {
	c := cursor{dir: dir, after: after, fn: func(r Record) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return fn(r)
	}}
	defer c.close()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		if err := c.drain(); err != nil && !(c.segment == 0 && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
		if c.bad != nil {
			return c.bad
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// cursor is a place in a log that is being written.
type cursor struct {
	dir   string
	after int64
	fn    func(Record) error
	bad   *Bad

	file    *os.File
	segment int64 // its first record
	offset  int64 // after the last whole line
	line    int
}

func (c *cursor) close() {
	if c.file != nil {
		c.file.Close()
	}
}

// drain reads what there is.
func (c *cursor) drain() error {
	for {
		if c.file != nil {
			if err := c.lines(); err != nil {
				return err
			}
		}
		next, err := c.next()
		if err != nil || next == 0 {
			return err
		}
		if c.file != nil {
			// Now that the next one exists this one is at its end, which it may not have been when it was read.
			if err := c.lines(); err != nil {
				return err
			}
		}
		f, err := os.Open(filepath.Join(c.dir, segment{first: next}.name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // dropped meanwhile
		}
		if err != nil {
			return fmt.Errorf("audit: %w", err)
		}
		c.close()
		c.file, c.segment, c.offset, c.line = f, next, 0, 0
	}
}

// next returns the segment to read after the present one, or 0.
func (c *cursor) next() (int64, error) {
	segments, err := list(c.dir)
	if err != nil {
		return 0, err
	}
	best := int64(0)
	for _, s := range segments {
		switch {
		case c.file != nil && s.first > c.segment:
			return s.first, nil
		case c.file == nil && (best == 0 || s.first <= c.after+1):
			best = s.first
		}
	}
	return best, nil
}

func (c *cursor) lines() error {
	if info, err := c.file.Stat(); err == nil && info.Size() < c.offset {
		c.offset = info.Size() // a torn end was cut off
	}
	return lines(io.NewSectionReader(c.file, c.offset, 1<<62), c.line, func(n int, line []byte, size int64) error {
		if !complete(line) {
			return nil
		}
		c.offset += size
		c.line = n
		if n == 1 {
			return nil
		}
		r, err := decode(line)
		if err != nil {
			if c.bad == nil {
				c.bad = &Bad{segment{first: c.segment}.name(), n, c.after + 1, Edited, err.Error()}
			}
			return nil
		}
		if r.Seq <= c.after {
			return nil
		}
		if err := c.fn(r); err != nil {
			return err
		}
		c.after = r.Seq
		return nil
	})
}
