package warren

import (
	"context"
	"iter"

	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// PortEvent says that a port opened or closed.
type PortEvent struct {
	Port
	// Closed is false for a port that opened, or that was open when the watch began.
	Closed bool `json:"closed,omitempty"`
}

// Ports returns the TCP ports on which something in the sandbox listens now.
func (s *Sandbox) Ports(ctx context.Context) ([]Port, error) {
	var ports []Port
	for e, err := range s.watchPorts(ctx, true) {
		if err != nil {
			return nil, err
		}
		if !e.Closed {
			ports = append(ports, e.Port)
		}
	}
	return ports, nil
}

// WatchPorts returns the ports that listen now, then those that open and close. The first error ends the watch.
func (s *Sandbox) WatchPorts(ctx context.Context) iter.Seq2[PortEvent, error] {
	return s.watchPorts(ctx, false)
}

func (s *Sandbox) watchPorts(ctx context.Context, once bool) iter.Seq2[PortEvent, error] {
	return func(yield func(PortEvent, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := s.guest.warren.WatchPorts(ctx, request("", &guestv1.WatchPortsRequest{NoFollow: once}))
		if err != nil {
			yield(PortEvent{}, fromWire("watch ports", err))
			return
		}
		defer stream.Close()
		for stream.Receive() {
			var p *guestv1.WatchPortsResponse_Port
			closed := false
			switch e := stream.Msg().GetEvent().(type) {
			case *guestv1.WatchPortsResponse_Open:
				p = e.Open
			case *guestv1.WatchPortsResponse_Close:
				p, closed = e.Close, true
			}
			if p == nil {
				continue
			}
			if !yield(PortEvent{Port{int(p.GetPort()), p.GetAddress(), int(p.GetPid()), p.GetProgram()}, closed}, nil) {
				cancel()
				return
			}
		}
		err = stream.Err()
		if err != nil {
			yield(PortEvent{}, fromWire("watch ports", err))
		} else if !once {
			yield(PortEvent{}, streamEnd("watch ports", nil))
		}
	}
}
