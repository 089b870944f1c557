package framing

import (
	"errors"
	"net/http/httptrace"
	"net/textproto"
)

// maxInformational is how many answers of 1xx may come before an answer. Some servers send one every few seconds while they work.
const maxInformational = 1000

// LimitInformational ends a request to which answers of 1xx come without end. Who takes them as they come, as a reverse proxy does, is who has to count them.
// It belongs into the context that the proxy is given, so that its word is the last.
func LimitInformational() *httptrace.ClientTrace {
	n := 0
	return &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		if n++; n > maxInformational {
			return errors.New("more informational answers came than anybody needs, and no answer")
		}
		return nil
	}}
}
