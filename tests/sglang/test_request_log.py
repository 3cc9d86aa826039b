"""What SGLang's own RequestLogger writes, read as a trace."""

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.request_logger import RequestLogger

from sgl_prefix_attn.tools.analyze import trace_file

OUT = {"text": "It's text='x', input_ids=[1]", "output_ids": [9, 9, 9], "meta_info": {
    "id": "r", "finish_reason": {"type": "length"}, "prompt_tokens": 40, "cached_tokens": 0,
    "completion_tokens": 3, "e2e_latency": 1.25,
}}  # fmt: skip


@pytest.fixture
def log(tmp_path):
    """(format, level, *(token ids or text, how many tokens they are)) -> the lines of the log."""

    def log(form, level, *prompts):
        folder = tmp_path / f"{form}{level}"
        logger = RequestLogger(True, level, form, [str(folder)])
        for prompt, tokens in prompts:
            field = "text" if isinstance(prompt, str) else "input_ids"
            request = GenerateReqInput(**{field: prompt}, sampling_params={"max_new_tokens": 3})
            request.normalize_batch_and_arguments()
            logger.log_received_request(request)
            meta = OUT["meta_info"] | {"prompt_tokens": tokens}
            logger.log_finished_request(request, OUT | {"meta_info": meta})
        [file] = folder.iterdir()
        return file.open("rb")

    return log


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize(
    ("prompt", "other", "blocks"),
    [
        (list(range(40)), [*range(32), *[7] * 8], 1),
        (
            'He said "it\'s, input_ids=None"\n' * 5,
            'He said "it\'s, input_ids=None"\n' * 4 + "x" * 32,
            0,
        ),
    ],
)
def test_every_finished_request_is_read(log, form, level, prompt, other, blocks):
    found = trace_file.read(log(form, level, (prompt, 40), (prompt, 40), (other, 38)))
    trace = found.trace
    is_text = isinstance(prompt, str)  # whose tokens follow from all requests' counts
    assert found.bad == 0 and len(found.notes) == is_text
    assert trace.prompt.tolist() == ([39, 39, 40] if is_text else [40, 40, 38])
    assert trace.output.tolist() == [3, 3, 3]
    one, two, three = (
        trace.blocks[first:][:count].tolist()
        for first, count in zip(trace.first, trace.num_blocks, strict=True)
    )
    assert one == two and one[:blocks] == three[:blocks] and one[blocks] != three[blocks]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("prompt", [[7] * 3000, "x" * 3000])
def test_level_2_cuts_and_level_3_does_not(log, form, prompt):
    cut = trace_file.read(log(form, 2, (prompt, 3000)))
    whole = trace_file.read(log(form, 3, (prompt, 3000)))
    per_block = 32 if isinstance(prompt, list) else 128
    assert "logged in part" in cut.notes[0] and cut.trace.num_blocks.tolist() == [1024 // per_block]
    assert len(whole.notes) == isinstance(prompt, str)  # a token is a character, it says
    assert whole.trace.num_blocks.tolist() == [-(-3000 // 32)]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lower_levels_are_refused_with_the_reason(log, form):
    with pytest.raises(ValueError, match="no request; line .*--log-requests-level 2"):
        trace_file.read(log(form, 1, ([1, 2], 2)))
