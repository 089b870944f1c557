package audit

import (
	"strings"
	"testing"
)

// fake puts a token together, so that no file of this repository holds one.
func fake(parts ...string) string { return strings.Join(parts, "") }

func TestMask(t *testing.T) {
	t.Parallel()
	long := "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg"
	tests := []struct{ in, want string }{
		// Shapes.
		{fake("push with ", "gh", "p_", strings.Repeat("a1", 18), " failed"), "push with ghp_*** failed"},
		{fake("gh", "s_", strings.Repeat("a1", 18)), "ghs_***"},
		{fake("github", "_pat_11AAA", strings.Repeat("x", 40), "!"), "github_pat_***!"},
		{fake("s", "k-ant-api03-", long), "sk-***"},
		{fake("there is no sandbox warren", "_", strings.Repeat("0f", 32), "!"), "there is no sandbox warren_***!"},
		{"warren_preview and warren_token", "warren_preview and warren_token"},
		{fake("id=", "AK", "IA", strings.Repeat("Q", 16), ","), "id=AKIA***,"},
		{fake("xo", "xb-123456789012-abcdefghij"), "xoxb-***"},
		{fake("jwt ", "ey", "JhbGciOiJIUzI1NiJ9.", "eyJzdWIiOiIxIn0.", "c2lnbmF0dXJl end"), "jwt eyJ*** end"},
		{fake("-----BEGIN RSA ", "PRIVATE KEY-----\nMIIE\nabc\n-----END RSA ", "PRIVATE KEY-----\nafter"), "***\nafter"},
		{fake("-----BEGIN ", "PRIVATE KEY-----\nMIIE cut"), "***"},
		// URLs.
		{"GET https://user:hunter2@host.lab/p?q=1", "GET https://***@host.lab/p?q=1"},
		{"clone https://x-access-token@git.lab/r.git ok", "clone https://***@git.lab/r.git ok"},
		{"mail a@b.lab and https://host.lab/@scope/pkg", "mail a@b.lab and https://host.lab/@scope/pkg"},
		{"https://h.lab/p?a=1&access_token=abc&b=2", "https://h.lab/p?a=1&access_token=***&b=2"},
		{"https://h.lab/p?X-Amz-Signature=0f1e&api-key=x#f", "https://h.lab/p?X-Amz-Signature=***&api-key=***"},
		{"https://h.lab/?next=https%3A%2F%2Fo.lab%2F%3Fclient_secret%3Dabcdef", "https://h.lab/?next=https%3A%2F%2Fo.lab%2F%3Fclient_secret%3D***"},
		// Headers.
		{"Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"},
		{"authorization: Basic dXNlcjpwYXNz\r\nHost: h.lab", "authorization: Basic ***\r\nHost: h.lab"},
		{"Cookie: a=b; sid=c d\nX: y", "Cookie: ***\nX: y"},
		{"X-Api-Key: k1\nAccept: */*", "X-Api-Key: ***\nAccept: */*"},
		{"curl -H 'Authorization: token abc' https://h.lab", "curl -H 'Authorization: token ***' https://h.lab"},
		{"sent Bearer abcdefghij to it", "sent Bearer *** to it"},
		// Text, JSON, arguments.
		{"password=hunter2 user=ann", "password=*** user=ann"},
		{"DB_PASSWORD=hun ter", "DB_PASSWORD=*** ter"},
		{`{"apiKey":"abc","n":1}`, `{"apiKey":"***","n":1}`},
		{`{"password": "a\"b\\", "n": "x"}`, `{"password": "***", "n": "x"}`},
		{`{\"token\":\"abc\",\"n\":1}`, `{\"token\":\"***\",\"n\":1}`},
		{"clientSecret='abc' x", "clientSecret='***' x"},
		{"tool --token abc --verbose", "tool --token *** --verbose"},
		{`["tool","--api-key","abc","-v"]`, `["tool","--api-key","***","-v"]`},
		{"the signing key: " + long + " was used", "the signing key: *** was used"},
		{"secret = " + long, "secret = ***"},
		// What is none.
		{"token: expired, sign in again", "token: expired, sign in again"},
		{"exit code=1 and key=a, status_code=404", "exit code=1 and key=a, status_code=404"},
		{"secret:// is no scheme", "secret:// is no scheme"},
		{"author=ann monkey=1 keyboard=us", "author=ann monkey=1 keyboard=us"},
		{"sha256:" + strings.Repeat("ab", 32), "sha256:" + strings.Repeat("ab", 32)},
		{"dial tcp [::1]:443: connection refused", "dial tcp [::1]:443: connection refused"},
		{"", ""},
	}
	for _, tt := range tests {
		got := Mask(tt.in)
		if got != tt.want {
			t.Errorf("Mask(%q)\n got %q\nwant %q", tt.in, got, tt.want)
		}
		if again := Mask(got); again != got {
			t.Errorf("Mask of %q is %q: it must change nothing", got, again)
		}
	}
}

func TestKeyish(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]strength{
		"api_key": strong, "X-Auth-Token": strong, "clientSecret": strong, "PASSWORD": strong, "AccessKeyId": strong, "ssh-key": strong, "user_pw": strong,
		"sig": weak, "exit_code": weak, "registryKey": weak, "public.key": weak,
		"monkey": none, "author": none, "design": none, "keyboard": none, "passage": none, "": none, "k": none, "spin": none, "encode": none,
	} {
		if got := keyish(name); got != want {
			t.Errorf("keyish(%q) = %v, want %v", name, got, want)
		}
	}
}

func FuzzMask(f *testing.F) {
	for _, s := range []string{`"token":"a\"b"`, "a%3Db", "--key=", "Authorization: Basic ", `\"pw\":\"`, "://@", "password=\\\"x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		Mask(s)
		// Wherever a known one stands, it goes.
		token := fake("gh", "p_", strings.Repeat("Ab1", 12))
		if strings.Contains(Mask(s+" "+token+" "+s), token) {
			t.Errorf("a token between two %q stays", s)
		}
	})
}

func BenchmarkMask(b *testing.B) {
	for name, s := range map[string]string{
		"plain":  "GET registry.lab:443 allowed by rule registries/12, 1532 bytes up, 98211 down",
		"secret": "GET https://h.lab/p?a=1&access_token=abcdefghijklmnop&b=2 Authorization: Bearer abcdefghijklmnopqrstuvwxyz",
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(s)))
			for b.Loop() {
				Mask(s)
			}
		})
	}
	// Hostile texts cost no more than their length.
	for _, s := range []string{"token:", "token=", `"token":"`, "--key ", "a:b@://", "eyJ", "-----BEGIN PRIVATE KEY-----", "Bearer ", `\\\"`, "%3Dtoken", "Authorization: "} {
		text := strings.Repeat(s, maxInput/len(s))
		b.Run("hostile/"+s, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				Mask(text)
			}
		})
	}
}
