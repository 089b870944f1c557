package engine

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// metrics are what Prometheus sees of the engine.
type metrics struct {
	reg        prometheus.Registerer
	all        []prometheus.Collector
	creates    *prometheus.CounterVec
	duration   prometheus.Histogram
	milestones *prometheus.HistogramVec
	errors     *prometheus.CounterVec
	expired    prometheus.Counter
	pauses     *prometheus.CounterVec
	resumes    prometheus.Counter
	evictions  prometheus.Counter
	commits    prometheus.Histogram
	changes    prometheus.Counter
}

func newMetrics(e *Engine, reg prometheus.Registerer) (*metrics, error) {
	buckets := prometheus.ExponentialBuckets(0.001, 2, 16) // 1 ms to 33 s
	m := &metrics{
		reg:        reg,
		creates:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warren_sandbox_creates_total", Help: "Creates of sandboxes by result."}, []string{"result"}),
		duration:   prometheus.NewHistogram(prometheus.HistogramOpts{Name: "warren_sandbox_create_seconds", Help: "Time of successful creates.", Buckets: buckets}),
		milestones: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "warren_sandbox_create_step_seconds", Help: "Time of each step of creates.", Buckets: buckets}, []string{"step"}),
		errors:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warren_driver_errors_total", Help: "Calls of drivers that failed."}, []string{"driver", "op"}),
		expired:    prometheus.NewCounter(prometheus.CounterOpts{Name: "warren_sandbox_expired_total", Help: "Sandboxes ended by timeout."}),
		pauses:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warren_sandbox_pauses_total", Help: "Pauses of sandboxes by why: asked, idle or memory."}, []string{"reason"}),
		resumes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "warren_sandbox_resumes_total", Help: "Resumes of paused sandboxes."}),
		evictions:  prometheus.NewCounter(prometheus.CounterOpts{Name: "warren_sandbox_evictions_total", Help: "Sandboxes paused because the host's memory ran short, or paused ones failed because its disk did."}),
		commits:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "warren_store_commit_seconds", Help: "Time of each commit of the store.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16)}),
		changes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "warren_store_changes_total", Help: "Changes committed to the store."}),
	}
	m.all = []prometheus.Collector{m.creates, m.duration, m.milestones, m.errors, m.expired, m.pauses, m.resumes, m.evictions, m.commits, m.changes, &stateCollector{e},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "warren_start_queue_length", Help: "Starts that wait for a slot."}, func() float64 { return float64(e.starts.len()) }),
	}
	e.store.Observe(func(d time.Duration, changes int) {
		m.commits.Observe(d.Seconds())
		m.changes.Add(float64(changes))
	})
	if reg != nil {
		for i, c := range m.all {
			if err := reg.Register(c); err != nil {
				m.all = m.all[:i]
				m.unregister()
				return nil, err
			}
		}
	}
	return m, nil
}

func (m *metrics) unregister() {
	if m.reg != nil {
		for _, c := range m.all {
			m.reg.Unregister(c)
		}
	}
}

func (m *metrics) created(err error, took time.Duration) {
	m.creates.WithLabelValues(kind(err)).Inc()
	if err == nil {
		m.duration.Observe(took.Seconds())
	}
}

func (m *metrics) milestone(step string, took time.Duration) {
	m.milestones.WithLabelValues(step).Observe(took.Seconds())
}

func (m *metrics) driverError(driver, op string) { m.errors.WithLabelValues(driver, op).Inc() }

// kind names an error in few words, so that labels stay few.
func kind(err error) string {
	if err == nil {
		return "ok"
	}
	for _, k := range []struct {
		err  error
		name string
	}{
		{warren.ErrNotFound, "not_found"}, {warren.ErrExists, "exists"}, {warren.ErrInvalid, "invalid"}, {warren.ErrDenied, "denied"},
		{context.Canceled, "canceled"}, {context.DeadlineExceeded, "deadline"}, {warren.ErrState, "state"}, {warren.ErrExhausted, "exhausted"},
		{warren.ErrUnavailable, "unavailable"}, {errUnsupported, "unsupported"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return "internal"
}

// stateCollector counts sandboxes by state when it is asked.
type stateCollector struct{ e *Engine }

var imagesDesc = prometheus.NewDesc("warren_paused_image_bytes", "Bytes on disk of the memory of paused sandboxes.", nil, nil)

var standbyDesc = prometheus.NewDesc("warren_standby_sandboxes", "Sandboxes of templates that are restored and that nobody has asked for yet.", nil, nil)

var poolDesc = prometheus.NewDesc("warren_pool_starts_total", "Creates, forks and resumes by whether an execution was ready for them in the driver's pool.", []string{"driver", "ready"}, nil)

var pooledDesc = prometheus.NewDesc("warren_pool_ready", "Executions that are ready in the driver's pool for sandboxes like those made last.", []string{"driver"}, nil)

// pooledWait is how long a driver may take to say how many executions are ready; one that takes longer is left out.
const pooledWait = time.Second

var stateDesc = prometheus.NewDesc("warren_sandboxes", "Sandboxes by state.", []string{"state"}, nil)

// Describe implements [prometheus.Collector].
func (s *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- stateDesc
	ch <- imagesDesc
	ch <- standbyDesc
	ch <- poolDesc
	ch <- pooledDesc
}

// Collect implements [prometheus.Collector].
func (s *stateCollector) Collect(ch chan<- prometheus.Metric) {
	n := map[State]int{Creating: 0, Running: 0, Paused: 0, Failed: 0, Deleting: 0}
	var images int64
	s.e.mu.Lock()
	for _, sb := range s.e.boxes {
		n[sb.state()]++
		images += sb.image
	}
	standbys := 0
	for _, k := range s.e.standbys {
		standbys += len(k.have)
	}
	s.e.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(standbyDesc, prometheus.GaugeValue, float64(standbys))
	for name, d := range s.e.opts.Drivers {
		if p, ok := driver.As[driver.Pooler](d); ok {
			hits, misses := p.PoolUse()
			ch <- prometheus.MustNewConstMetric(poolDesc, prometheus.CounterValue, float64(hits), name, "true")
			ch <- prometheus.MustNewConstMetric(poolDesc, prometheus.CounterValue, float64(misses), name, "false")
			ctx, cancel := context.WithTimeout(s.e.ctx, pooledWait)
			if n, err := p.Pooled(ctx); err == nil {
				ch <- prometheus.MustNewConstMetric(pooledDesc, prometheus.GaugeValue, float64(n), name)
			}
			cancel()
		}
	}
	ch <- prometheus.MustNewConstMetric(imagesDesc, prometheus.GaugeValue, float64(images))
	for state, count := range n {
		ch <- prometheus.MustNewConstMetric(stateDesc, prometheus.GaugeValue, float64(count), string(state))
	}
}
