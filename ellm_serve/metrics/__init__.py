"""The metrics of the service: a table of all there are, and the recorder behind /metrics.

Names, types, labels and buckets of `vllm:` metrics are vLLM's; what it has no name for is `ellm:`;
`http_*` are those of the common FastAPI instrumentator. Label values come from closed sets, never
from users. All `vllm:` and `ellm:` series exist, at 0, from the start. Plain numbers in: nothing
here knows of requests, engines or HTTP.
"""

from ellm_serve.metrics.recorder import CONTENT_TYPE, Gauges, Metrics
from ellm_serve.metrics.table import FINISH_REASONS, REJECTIONS, Rejection

__all__ = ["CONTENT_TYPE", "FINISH_REASONS", "REJECTIONS", "Gauges", "Metrics", "Rejection"]
