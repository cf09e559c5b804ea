from __future__ import annotations

import pytest

from client_sdk.patience import LONGEST_SECONDS, Patience
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.types import AcquirePolicy


def test_a_deadline_grows_with_the_tokens_up_to_what_the_daemon_does() -> None:
    patience = Patience(0.5, 0.25)
    seconds = [patience.deadline_seconds(AcquirePolicy.TIMEOUT, n) for n in (0, 512, 4096, 10**9)]
    assert seconds == [0.5, 0.625, 1.5, LONGEST_SECONDS]


@pytest.mark.parametrize("policy", [AcquirePolicy.BEST_EFFORT, AcquirePolicy.WAIT_COMPLETE])
def test_other_policies_leave_it_to_the_daemon(policy: AcquirePolicy) -> None:
    assert Patience().deadline_seconds(policy, 4096) == 0.0


@pytest.mark.parametrize("values", [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_a_patience_that_is_no_time_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(InvalidRequestError, match="finite"):
        Patience(*values)
