package secret

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html"
	"strings"
)

// Form is one way in which a value can be written.
type Form struct {
	// Name is plain, json, html, url, hex or base64.
	Name, Text string
}

// Forms returns the ways in which a value can be written that a [Scrubber] finds, each once: as it is, then escaped, in hex, and the
// parts of its base64 that do not depend on what stands beside it.
func Forms(value string) []Form {
	list := []Form{}
	for _, f := range forms(value, "") {
		list = append(list, f.Form)
	}
	return list
}

// form is a form of a value and what stands for it, written in the same way.
type form struct {
	Form
	with string
}

func forms(value, with string) []form {
	list := []form{{Form{"plain", value}, with}}
	seen := map[string]bool{value: true}
	add := func(name, text, with string) {
		if !seen[text] {
			seen[text] = true
			list = append(list, form{Form{name, text}, with})
		}
	}
	for _, e := range escapes {
		add(e.name, e.fn(value), e.fn(with))
	}
	for align := range 3 {
		// Of the length that keeps what follows where it was in its group of four.
		pad := strings.Repeat(".", (len(value)-len(with)%3+3)%3)
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			add("base64", inner(enc, value, align), inner(enc, with+pad, align))
		}
	}
	return list
}

// inner returns the letters of base64 that a text fills wholly when align bytes stand before it.
func inner(enc *base64.Encoding, text string, align int) string {
	whole := enc.EncodeToString([]byte("\x00\x00\x00"[:align] + text))
	end := 8 * (align + len(text)) / 6
	return whole[min((8*align+5)/6, end):end]
}

type escape struct {
	name string
	fn   func(string) string
}

var escapes = func() (list []escape) {
	add := func(name string, fns ...func(string) string) {
		for _, fn := range fns {
			list = append(list, escape{name, fn})
		}
	}
	// What must be; with slashes (PHP); as Go does for HTML, in both cases; as .NET does.
	add("json",
		replacer(`\`, `\\`, `"`, `\"`),
		replacer(`\`, `\\`, `"`, `\"`, `/`, `\/`),
		replacer(`\`, `\\`, `"`, `\"`, `<`, `\u003c`, `>`, `\u003e`, `&`, `\u0026`),
		replacer(`\`, `\\`, `"`, `\"`, `<`, `\u003C`, `>`, `\u003E`, `&`, `\u0026`),
		replacer(`\`, `\\`, `"`, `\u0022`, `<`, `\u003C`, `>`, `\u003E`, `&`, `\u0026`, `'`, `\u0027`, `+`, `\u002B`, "`", `\u0060`),
	)
	// Text, and attributes as Go, PHP, Python, XML and Go's templates write them.
	add("html",
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`),
		html.EscapeString,
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&quot;`),
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&quot;`, `'`, `&#039;`),
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&quot;`, `'`, `&#39;`),
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&quot;`, `'`, `&#x27;`),
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&quot;`, `'`, `&apos;`),
		replacer(`&`, `&amp;`, `<`, `&lt;`, `>`, `&gt;`, `"`, `&#34;`, `'`, `&#39;`, `+`, `&#43;`),
	)
	add("hex",
		func(s string) string { return hex.EncodeToString([]byte(s)) },
		func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
	)
	// URLs: what each of these leaves as it is, beside letters and digits.
	for _, keep := range []string{
		"",                       // all that is no letter or digit
		"-_.~",                   // RFC 3986
		"-_.",                    // older
		"-_.*",                   // forms
		"-_.~!'()*",              // a component in JavaScript
		"-_.~$&+=:@",             // a path segment
		"-_.~/",                  // Python's quote
		"-_.~!'()*;/?:@&=+$,",    // a URL in JavaScript
		"-_.~!'()*;/?:@&=+$,#[]", // the same, newer
	} {
		for _, format := range []string{"%%%02X", "%%%02x"} {
			for _, blank := range []string{"%20", "+"} {
				add("url", func(s string) string { return percent(s, keep, format, blank) })
			}
		}
	}
	for _, format := range []string{"%%%02X", "%%%02x"} {
		add("url", func(s string) string {
			var b strings.Builder
			for i := range len(s) {
				fmt.Fprintf(&b, format, s[i])
			}
			return b.String()
		})
	}
	return list
}()

func replacer(pairs ...string) func(string) string { return strings.NewReplacer(pairs...).Replace }

func percent(s, keep, format, blank string) string {
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte(keep, c) >= 0:
			b.WriteByte(c)
		case c == ' ':
			b.WriteString(blank)
		default:
			fmt.Fprintf(&b, format, c)
		}
	}
	return b.String()
}
