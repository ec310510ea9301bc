"""Reports, read by other parsers; and comparisons of results whose noise is known."""

import json
import re
import shutil
from html.parser import HTMLParser
from importlib.util import find_spec
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from support.refusals import refusal

from specjax.bench.reports.compare import compare
from specjax.bench.reports.noise import of_pairs, of_requests, of_rounds
from specjax.bench.reports.saved import parse
from specjax.bench.reports.svg import ticks
from specjax.bench.result import Accepted, Details, Distribution, Peer, Speculation, as_json
from specjax.cli import main

CHROMIUM = shutil.which("chromium")
NASTY = '<script src="http://a.b/c">alert(1)</script> & "x" | `$_` \n| y'
ROUNDS = [(3, 3), (3, 1), (2, 0), (3, 2)]
RANDOM = np.random.default_rng(3)


def served(latencies=(0.5, 0.25), *, settings=(), dataset=(), rounds=(), **top):
    """Return the JSON of a `bench serve` result whose name needs escaping in every format."""
    counts = Accepted.of_rounds(ROUNDS).as_json()
    histograms = [(1.0, {"3": 2}), (2.0, {"3": 2}), (3.0, {"3": 5, "0": 1})]
    details = Details(
        benchmark="serve",
        settings={"temperature": 0.0, "k": 3, "request_rate": 4.0, **dict(settings)},
        environment={
            **{"versions": {"jax": "1", "specjax": "2"}, "device_kind": NASTY, "platform": "gpu"},
            "commit": None,
        },
        machine={"doubts": []},
        dataset={
            **{"name": NASTY, "path": None, "num_requests": len(latencies)},
            **{"mean_prompt_len": 7.0, "chat_template": None, "notes": [], **dict(dataset)},
        },
        rounds=list(rounds),
        distributions={"e2el_ms": Distribution.of([1e3 * x for x in latencies]), "itl_ms": None},
        goodput={"limits_ms": {"ttft": 5.0}, "share_by_limit": {"ttft": 0.75}, "share": 0.625},
        steady={"rule": NASTY, "begin": 0.5, "end": 2.5, "output_throughput": 99.5},
        timeline={
            "output_tokens": [4.0, 1.0, 2.0],
            "running": [2.0, 1.0, 1.0],
            "k_histograms": [{"seconds": s, "rounds": found} for s, found in histograms],
        },
        speculation=Speculation(
            total=counts, by_group={NASTY: counts, "b": counts}, k_histogram={"0": 1, "3": 5}
        ),
        peers=[
            Peer(
                name=NASTY,
                version=None,
                figures={"output_throughput": 41.152},
                ratios={"output_throughput": 3.0},
                outputs=None,
            )
        ],
    )
    named = {"model_id": NASTY, "completed": len(latencies), "failed": 0, **top}
    latencies = list(latencies)
    figures = {"output_throughput": 123.456, "mean_e2el_ms": 1e3 * float(np.mean(latencies))}
    return json.loads(json.dumps(as_json({**named, "latencies": latencies, **figures}, details)))


@pytest.fixture
def draw(tmp_path):
    def draw(result, name):
        (tmp_path / "r.json").write_text(json.dumps(result))
        out = tmp_path / name
        assert main(["bench", "report", str(tmp_path / "r.json"), "-o", str(out)]) == 0
        return out

    return draw


class Elements(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.data = set(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.data.append(data)


def test_a_page_has_the_numbers_asks_for_nothing_and_escapes_all_texts(draw):
    result = served(settings={"model": NASTY, NASTY: NASTY})
    page = draw(result, "a.html").read_text()
    found = Elements(page)
    assert not found.tags & {"script", "link", "img", "iframe", "object", "base", "a", "image"}
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "href", "style", "xlink:href", "background", "action"}
    assert not [name for name in names if name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    style = next(text for text in found.data if "prefers-color-scheme: dark" in text)
    assert "url(" not in style and "@import" not in style
    texts = [text.strip() for text in found.data]
    assert texts.count(NASTY) >= 4  # a group in a legend and a table, a setting and its value
    values = {float(value) for name, value in found.attributes if name == "value"}
    details = result["specjax"]
    total, latency = details["speculation"]["total"], details["distributions"]["e2el_ms"]
    expected = [result["output_throughput"], *(latency[x] for x in ("mean", "std", "p99"))]
    expected += [total["acceptance_length"], *total["rates_per_position"], 5, 1]
    expected += [41.152, 3.0, 0.75, 0.625, 99.5]
    assert values >= set(expected)


def test_marks_of_charts_are_at_their_numbers(draw):
    result = served()
    page = draw(result, "a.html").read_text()
    pattern = re.compile(r"<h2>([^<]*)</h2>(?:<p.*?</p>)?(<svg.*?</svg>)", re.DOTALL)
    charts = pattern.findall(page)
    drawn = {title: ElementTree.fromstring(svg) for title, svg in charts}
    heights = [float(one.get("height")) for one in drawn["Acceptance by position"].iter("rect")]
    rates = 3 * result["specjax"]["speculation"]["total"]["rates_per_position"]
    assert np.allclose(np.divide(heights, heights[0]), np.divide(rates, rates[0]), atol=2e-3)
    marks = [
        (float(one.get("cx")), float(one.get("cy"))) for one in drawn["K over time"].iter("circle")
    ]
    # In the third second 3 rounds with K = 3 and one without drafts; in the second none.
    assert [one.findtext("title") for one in drawn["K over time"].iter("circle")] == [
        *("1.00: 3.00", "3.00: 2.25"),
    ]
    assert marks[0][0] < marks[1][0] and marks[0][1] < marks[1][1]
    curve = drawn["End-to-end latency (E2EL), ms"].find("polyline").get("points").split()
    assert len(curve) == 101
    for _ in range(200):
        low, high = sorted(RANDOM.normal(size=2) * 10.0 ** RANDOM.integers(-6, 7))
        found = ticks(low, high)
        assert 2 <= len(found) <= 7 and low - 1e-9 <= found[0] < found[-1] <= high + 1e-9


@pytest.mark.slow
def test_markdown_has_whole_rows_and_a_picture_has_charts(draw):
    result = served()
    text = draw(result, "a.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1
    assert "| Output tokens per second | 123.46 |" in text
    assert not re.search(r"(?<!\\)[<`$]", text.replace("\\`$", "")) and "alert" in text
    from matplotlib.image import imread

    picture = imread(BytesIO(draw(result, "a.png").read_bytes()))
    assert abs(picture.shape[1] - 3 * 4.6 * 120) < 1 and picture[..., :3].std() > 0.05


@pytest.mark.parametrize("suffix", ["html", "md", "png"])
def test_a_result_without_drafts_has_no_empty_charts(draw, suffix):
    plain = {"configuration": "plain", "method": "plain", "k": 0, "acceptance_per_position": []}
    names = "tokens_per_second plain_tokens_per_second times_plain ms_per_step plain_steps"
    plain |= dict.fromkeys([*names.split(), "mean_acceptance_length"], 1.5)
    top = {"benchmark": "speculation", "schema_version": 2, "timestamp": "now"}
    top |= {"is_interrupted": True, "outputs_identical": True, "configurations": [plain]}
    top |= {"settings": {"model": "m", "num_prompts": 2, "batch_size": 1}}
    result = top | {name: served()["specjax"][name] for name in ("machine", "environment")}
    drawn = draw(result, f"a.{suffix}").read_bytes()
    assert drawn.count(b"<svg") == (suffix == "html")
    assert draw(result | {"configurations": []}, f"b.{suffix}").stat().st_size


@pytest.mark.parametrize("spread", [0.01, 0.2])
def test_rounds_without_a_change_are_beyond_noise_in_one_case_of_20(spread):
    def beyond(factor):
        runs = [np.exp(spread * RANDOM.normal(size=(400, 5))) for _ in range(2)]
        intervals = [of_rounds(a, factor * b) for a, b in zip(*runs, strict=True)]
        return np.mean([not low <= 1 <= high for low, high in intervals])

    assert 0.02 < beyond(1.0) < 0.085  # three standard errors around 0.05, and Welch's deviation
    assert beyond(np.exp(6 * spread)) > 0.99
    assert of_rounds([1.0], [1.0, 2.0]) is None and of_rounds([0.0, 1.0], [1.0, 2.0]) is None


@pytest.mark.slow
def test_a_bootstrap_of_requests_covers_the_true_ratio():
    def interval(statistic, factor):
        before, after = RANDOM.exponential(size=(2, 150, 1))
        return of_requests(statistic, before, factor * after)

    for statistic in "mean", "p90":
        found = [interval(statistic, 1.3) for _ in range(40)]
        assert sum(low <= 1.3 <= high for low, high in found) >= 33  # of 38: 1 in 1000 by chance
    assert interval("p99", 1.0) is None  # 1.5 requests are beyond it
    # Values of a request stay together: 20 copies of each say no more than one.
    before, after = RANDOM.exponential(size=(2, 100, 1))
    copies = of_requests("mean", np.repeat(before, 20, 1), np.repeat(after, 20, 1))
    assert copies == pytest.approx(of_requests("mean", before, after))


def test_pairs_on_the_same_prompts_cover_the_true_ratio():
    """Prompts differ from each other much more than runs of the same prompts do."""
    found = []
    for _ in range(400):
        sizes = np.exp(RANDOM.normal(size=12))
        before, after = (
            {
                i: size * factor * np.exp(0.02 * RANDOM.normal(size=2))
                for i, size in enumerate(sizes)
            }
            for factor in (1.0, 1.1)
        )
        found.append(of_pairs(before, after))
    covered = np.mean([low <= 1.1 <= high for low, high in found])
    assert 0.91 < covered < 0.98 and np.mean([high - low for low, high in found]) < 0.05
    assert of_pairs({0: [1.0]}, {0: [2.0]}) is None  # one pair


@pytest.fixture
def compared(tmp_path, capsys):
    """Return a function that runs `bench compare` on two results, or on two lists of them."""

    def compared(before, after, *options):
        sides = []
        for name, side in zip("ab", (before, after), strict=True):
            side = side if isinstance(side, list) else [side]
            paths = [tmp_path / f"{name}{i}.json" for i in range(len(side))]
            for path, one in zip(paths, side, strict=True):
                path.write_text(json.dumps(one))
            sides.append(",".join(map(str, paths)))
        code = main(["bench", "compare", *sides, *options])
        return code, capsys.readouterr()

    return compared


def test_compare_lists_settings_and_tells_noise_from_change(compared):
    rates = [{"output_throughput": 100 + RANDOM.normal()} for _ in range(5)]
    slower = [{"output_throughput": one["output_throughput"] / 2} for one in rates]
    latencies = 1 + RANDOM.random(50)
    before = served(latencies, rounds=rates)
    after = served(latencies * 1.01, rounds=slower, settings={"k": 5})
    after["output_throughput"] /= 2
    code, printed = compared(before, after)
    lines = printed.out.splitlines()
    assert code == 0 and lines[1].split() == ["k", "3", "5"]
    assert "-50.0 %" in printed.out
    code, printed = compared(before, after, "--json", "--fail-over", "5%")
    found = json.loads(printed.out)
    assert code == 1 and found["failing"] == ["output_throughput"]
    assert found["settings"] == {"k": [3, 5]}
    change, latency = (found["changes"][key] for key in ("output_throughput", "mean_e2el_ms"))
    assert change["ratio"] == pytest.approx(0.5) and change["is_beyond_noise"]
    assert latency["ratio"] == pytest.approx(1.01) and latency["is_beyond_noise"] is False
    assert found["changes"]["acceptance_length"]["is_beyond_noise"] is None
    assert compared(after, before, "--fail-over", "5%")[0] == 0  # better
    without = served(latencies, failed=1)  # some of its latencies are of failed requests
    (unknown,) = [
        one.interval
        for one in compare(*([parse(json.dumps(x), "x")] for x in (without, after))).changes
        if one.key == "mean_e2el_ms"
    ]
    assert unknown is None


def test_repeated_results_tell_how_runs_differ(compared):
    """Repeated runs differ by 10 %, so a change of 5 % is noise, and a change of 100 % is not."""
    runs = [100.0, 110.0, 90.0]

    def change(factor):
        sides = [[served() for _ in runs] for _ in range(2)]
        for side, of in zip(sides, (1.0, factor), strict=True):
            for one, rate in zip(side, runs, strict=True):
                one["output_throughput"] = rate * of
        found = json.loads(compared(*sides, "--json")[1].out)
        return found["changes"]["output_throughput"]

    slight, large = change(1.05), change(2.0)
    assert slight["before"] == 100 and slight["ratio"] == pytest.approx(1.05)
    assert slight["interval_from"] == "3 and 3 runs" and slight["is_beyond_noise"] is False
    assert large["is_beyond_noise"]
    code, printed = compared([served(), served(settings={"k": 5})], served())
    assert code == 2 and "of one side differ" in printed.err and "k: 3 and 5" in printed.err


def test_other_workloads_and_foreign_files_are_refused(compared, tmp_path):
    before = served()
    for after, words in (
        (served(dataset={"name": "random"}), ["dataset name", "random"]),
        (served(settings={"request_rate": 8.0}), ["request_rate: 4.0 and 8.0"]),
    ):
        code, printed = compared(before, after)
        assert code == 2 and all(word in printed.err for word in words), printed.err
    wrong = served()
    wrong["specjax"]["schema_version"] = 99
    lacking = served()
    del lacking["specjax"]["rounds"], lacking["specjax"]["dataset"]
    for text, word in (
        ("{", "is not JSON"),
        ("[1]", "is not a result of specjax bench"),
        ('{"duration": 1.0, "completed": 2}', "--output-json"),
        ('{"specjax": 3}', "is not a result"),
        (json.dumps(wrong), "schema_version 99"),
        (json.dumps(lacking), "is damaged"),
        ('{"benchmark": "speculation", "schema_version": 2}', "lacks settings"),
    ):
        refusal(lambda text=text: parse(text, "x.json"), "x.json", word)
    (tmp_path / "r.json").write_bytes(b"\xff\xfe")
    result = str(tmp_path / "r.json")
    assert main(["bench", "report", result]) == main(["bench", "report", "none.json"]) == 2
    assert main(["bench", "report", result, "-o", "x.pdf"]) == 2


@pytest.mark.skipif(not (CHROMIUM and find_spec("playwright")), reason="there is no browser")
def test_a_browser_shows_the_page_on_a_phone_and_asks_no_host(draw):
    from playwright.sync_api import sync_playwright

    path = draw(served(), "a.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme="dark")
        asked, wrong = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.goto(path.as_uri())
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
        dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", dark))) < 60
        assert asked == [path.as_uri()] and not wrong
        browser.close()
