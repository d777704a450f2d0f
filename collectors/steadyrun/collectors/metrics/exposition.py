"""Values of the table as prometheus_client's metric families, for its text and OpenMetrics encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from steadyrun.collectors.metrics.spec import Family, MetricType
from steadyrun.collectors.metrics.values import Histogram

__all__ = ["Series", "registry_of"]

Series = tuple[Family, Mapping[tuple[str, ...], "float | Histogram"]]


class _Reader(Collector):
    """A collector that asks for everything anew at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Series]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for family, series in self._read():
            yield _metric(family, series)


def registry_of(read: Callable[[], Iterable[Series]]) -> CollectorRegistry:
    """A registry with what *read* gives at each scrape, in any thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reader(read))
    return registry


def _metric(family: Family, series: Mapping[tuple[str, ...], float | Histogram]) -> Metric:
    name, text, labels = family.base_name, family.help, family.label_names
    match family.type:
        case MetricType.INFO:
            info = InfoMetricFamily(name, text, labels=())
            for values in series:
                info.add_metric((), dict(zip(labels, values, strict=True)))
            return info
        case MetricType.HISTOGRAM:
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for values, value in series.items():
                assert isinstance(value, Histogram)
                histogram.add_metric(values, _buckets(family, value), value.total)
            return histogram
        case MetricType.COUNTER:
            metric: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(name, text, labels=labels)
        case MetricType.GAUGE:
            metric = GaugeMetricFamily(name, text, labels=labels)
    for values, value in series.items():
        assert not isinstance(value, Histogram)
        metric.add_metric(values, value)
    return metric


def _buckets(family: Family, histogram: Histogram) -> list[tuple[str, float]]:
    """Added up, as the exposition wants them."""
    out, so_far = [], 0
    for bound, count in zip((*family.buckets, float("inf")), histogram.counts, strict=True):
        so_far += count
        out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(so_far)))
    return out
