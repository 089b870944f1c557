package server

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts requests. A nil metrics counts nothing.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	underWay prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	if reg == nil {
		return nil, nil
	}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warren_http_requests_total", Help: "Requests by route and status."}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warren_http_request_seconds", Help: "How long requests took, streams included.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60, 600},
		}, []string{"route"}),
		underWay: prometheus.NewGauge(prometheus.GaugeOpts{Name: "warren_http_requests_under_way", Help: "Requests under way."}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.underWay} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// begin counts a request, and returns what to call at its end.
func (m *metrics) begin() func(route string, status int, took time.Duration) {
	if m == nil {
		return func(string, int, time.Duration) {}
	}
	m.underWay.Inc()
	return func(route string, status int, took time.Duration) {
		m.underWay.Dec()
		m.requests.WithLabelValues(route, itoa(int64(status))).Inc()
		m.seconds.WithLabelValues(route).Observe(took.Seconds())
	}
}
