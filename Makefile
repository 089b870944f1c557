# Targets for people and for CI. Each installs what it needs (Debian, root) and ends with a verdict.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

GO      ?= go
PREFIX  ?= /usr/local
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
# At most this many packages are compiled and tested at a time.
JOBS    ?= $(shell nproc)

export CGO_ENABLED := 0
# The runtime is built with a go.mod of its own, which Go refuses in a workspace.
export GOWORK := off
# The same flags as the tests', so that nothing is compiled twice: gVisor takes minutes.
GOBUILD := $(GO) build -buildvcs=false

GUEST_LIMIT   := 8388608
RUNTIME_LIMIT := 40000000

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## bin/warren, bin/warren-gateway, bin/warren-runtime and bin/warren-guest
	@script/setup.sh build
	@mkdir -p bin
	$(GOBUILD) -ldflags '-s -w' -o bin/warren-guest ./cmd/warren-guest
	gomod="$$($(GO) run ./driver/gvisor/patch .cache/gvisor)" && $(GOBUILD) -modfile="$$gomod" -ldflags '-s -w' -o bin/warren-runtime ./cmd/warren-runtime
	$(GOBUILD) -ldflags '-s -w' -o bin/warren-gateway ./cmd/warren-gateway
	$(GOBUILD) -ldflags '-s -w -X main.version=$(VERSION)' -o bin/warren ./cmd/warren

.PHONY: install
install: build ## copy the four binaries to PREFIX/bin (PREFIX=/usr/local)
	install -d '$(DESTDIR)$(PREFIX)/bin'
	install -m 0755 bin/warren bin/warren-gateway bin/warren-runtime bin/warren-guest '$(DESTDIR)$(PREFIX)/bin/'

.PHONY: demo
demo: build ## from a real repository to a diff, a kill and a commit, with times
	@script/setup.sh demo
	@script/demo.sh

.PHONY: test
test: build ## every test; a test that cannot run here fails
	@script/setup.sh test
	@WARREN_REQUIRE_ALL=1 WARREN_BIN=$(CURDIR)/bin $(GO) run ./script/testsum -vet off -p $(JOBS) -timeout 35m ./...

.PHONY: check
check: ## formatting, vet, staticcheck, generated code, import rules, cross-builds, sizes
	@script/setup.sh build
	@script/check.sh $(GUEST_LIMIT) $(RUNTIME_LIMIT)

.PHONY: bench
bench: build ## create, exec, file and network speed beside what else runs here
	@script/setup.sh bench
	@script/bench.sh

.PHONY: drivers
drivers: build ## one table for each driver: conformance, escapes and their twins, a benchmark
	@script/setup.sh test
	@script/setup.sh bench
	@script/drivers.sh

.PHONY: browser
browser: build ## previews in a real browser, which it installs
	@script/setup.sh browser
	@WARREN_REQUIRE_ALL=1 WARREN_BROWSER="$$(command -v chromium)" WARREN_BIN=$(CURDIR)/bin $(GO) run ./script/testsum -count 1 -run TestPreviewInBrowser ./cmd/warren

.PHONY: soak
soak: build ## thousands of kills and cycles; hours
	@script/setup.sh test
	@WARREN_REQUIRE_ALL=1 WARREN_SOAK=1 WARREN_BIN=$(CURDIR)/bin $(GO) run ./script/testsum -p 1 -timeout 12h -count 1 ./...

.PHONY: generate
generate: ## Go code and docs/API.md from proto/
	$(GO) run ./internal/protogen

.PHONY: clean
clean: ## remove what the targets made
	rm -rf bin .cache dist
