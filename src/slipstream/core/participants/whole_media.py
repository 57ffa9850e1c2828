"""Images whose tokens attend to each other, so that one step must compute all of them."""

from __future__ import annotations

from slipstream.core.participants.base import Participant
from slipstream.core.request import Request


class WholeMedia(Participant):
    def concerns(self, request: Request) -> bool:
        return bool(request.spec.media)

    def chunk(self, request: Request, computed: int, count: int, room: int) -> int:
        """Ends the chunk before an image that it would split, or after the image if it begins with
        it.

        The latter may exceed the limit of a step with decodes, but not that of a step.
        """
        end = computed + count
        cut = next((i for i in request.spec.media if i.offset < end < i.end), None)
        if cut is None:
            return count
        if cut.offset > computed:
            return cut.offset - computed
        return cut.end - computed if cut.end - computed <= room else 0
