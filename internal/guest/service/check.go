package service

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/channel"
	"github.com/warren-sandbox/warren/internal/guest/process"
)

// maxAnswer is how much of an answer is read for its status.
const maxAnswer = 4 << 10

// ask asks the service once.
func (u *unit) ask(ctx context.Context) error {
	c := u.spec.Check
	switch {
	case c.HTTPPath != "":
		return askHTTP(ctx, u.spec.Port, c.HTTPPath)
	case c.TCP:
		conn, err := channel.DialLoopback(ctx, u.spec.Port)
		if err == nil {
			conn.Close()
		}
		return err
	}
	p, err := u.t.Start(u.spec, c.Command, true)
	if err != nil {
		return err
	}
	select {
	case <-p.Ended():
	case <-ctx.Done():
		_ = p.Kill() // it may have ended
		return errors.New("the check's command takes too long")
	}
	if end, _ := p.End(); end.Code != 0 {
		return fmt.Errorf("the check's command: %s%s", end.Status, lastLine(p))
	}
	return nil
}

// lastLine returns what the command said last, which often is the reason.
func lastLine(p *process.Process) string {
	f := p.Output.Follow(0)
	defer f.Close()
	var text []byte
	for {
		chunk, err := f.Next(context.Background(), 0)
		if err != nil {
			break
		}
		text = append(text, chunk.Data...)
		text = text[max(len(text)-maxAnswer, 0):]
	}
	s := strings.TrimSpace(string(text))
	s = s[strings.LastIndexByte(s, '\n')+1:]
	if s == "" {
		return ""
	}
	return ": " + s[:min(len(s), 200)]
}

// askHTTP asks for a path. It speaks so little HTTP that a client of the standard library would be most of the guest.
func askHTTP(ctx context.Context, port uint16, path string) error {
	conn, err := channel.DialLoopback(ctx, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost:%d\r\nUser-Agent: warren\r\nConnection: close\r\n\r\n", path, port); err != nil {
		return err
	}
	line, err := bufio.NewReader(io.LimitReader(conn, maxAnswer)).ReadString('\n')
	if err != nil && line == "" {
		return fmt.Errorf("no answer: %w", err)
	}
	proto, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	word, _, _ := strings.Cut(rest, " ")
	code, err := strconv.Atoi(word)
	if !strings.HasPrefix(proto, "HTTP/1.") || err != nil || code < 100 {
		return errors.New("the answer is no HTTP")
	}
	if code >= 400 || code < 200 {
		return fmt.Errorf("GET %s: %d", path, code)
	}
	return nil
}
