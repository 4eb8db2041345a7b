"""One live profile of many events, read in place by Backspot and by PyTorch's ``key_averages()``.

    python -m benchmarks.cost.live_reading --events 180000

prints one line of JSON. ``key_averages()`` keeps what it made of the events, so that only its first
call is the price of reading them; Backspot reads them anew each time, and its first is counted too.
"""

from __future__ import annotations

import argparse
import json
import time

import benchmarks.common  # noqa: F401 - finds backspot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=180_000)
    options = parser.parse_args()
    try:
        import torch
        from torch import nn
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        print(json.dumps({"skipped": f"not installed ({error})"}))
        return
    import backspot
    import backspot.pipeline

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(40))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def record(steps: int) -> profile:
        with backspot.instrument(model), profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        return recorded

    record(1)
    few = len(record(4).profiler.kineto_results.events())
    recorded = record(max(1, round(4 * options.events / few)))
    begin = time.perf_counter()
    report = backspot.locate(recorded)
    located = time.perf_counter() - begin
    begin = time.perf_counter()
    recorded.key_averages()
    averaged = time.perf_counter() - begin
    result = {
        "events": len(recorded.profiler.kineto_results.events()),
        "locate": located,
        "key_averages": averaged,
        "modules": len(report.modules),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
