"""No false alarms: other drawn specs than those of the committed score pass on all kinds of runtimes."""

from __future__ import annotations

import pytest
from mutation.sound_specs import draw_specs, false_alarms

from posexport.runtimes import RUNTIMES

RUNTIMES_HERE = tuple(
    name for name in ("ort-cpu", "onnx-reference", "tensorrt-import") if RUNTIMES[name].missing() is None
)


@pytest.mark.slow
@pytest.mark.parametrize(("runtimes", "count"), [(("ort-cpu",), 48), (RUNTIMES_HERE[1:], 12)])
def test_sound_specs_pass(runtimes: tuple[str, ...], count: int) -> None:
    alarms = false_alarms(draw_specs(count, 1), runtimes, group=16)
    assert alarms.failed == []
    assert sum(alarms.passed.values()) > 0
