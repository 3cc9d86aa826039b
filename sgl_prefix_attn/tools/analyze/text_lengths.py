"""How many tokens the texts of a log are. A server has counted them, and what a token is in
characters, or words, follows from many requests: one ratio for the whole log, because prompts are
equal where their texts are, whatever each of them has for a token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sgl_prefix_attn.tools.analyze.trace import Request

MEASURED = 64  # requests of a log that tell the ratio


def per_token(requests: Iterable[Request]) -> float | None:
    """Return how many characters, or words, of text the server counted as a token, None where no
    request tells."""
    told = [x for x in requests if x.is_counted and not x.is_cut and x.content.size]
    if not told:
        return None
    return sum(x.content.size for x in told) / sum(x.prompt for x in told)


def measured(request: Request, ratio: float | None) -> Request:
    """Give a request of text the ratio, if there is one, and all of its text the tokens that follow
    from it: by the server's count of this one, what it shares with others would end elsewhere. Of
    a text that is cut, the server's count is all there is."""
    if ratio is None or not request.is_counted:
        return request
    whole = max(1, round(request.content.size / ratio))
    return replace(request, per_token=ratio, prompt=request.prompt if request.is_cut else whole)
