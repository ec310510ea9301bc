"""The page at / in a browser, and the rounds in answers, which show accepted drafts."""

import base64
import re
import shutil
from hashlib import sha256
from html.parser import HTMLParser
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from support.http import served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"return_rounds": True, "temperature": 0, "max_tokens": 60, "ignore_eos": True}
CHROMIUM = shutil.which("chromium")


def rounds_of(events):
    choices = [choice for event in events for choice in event["choices"]]
    return [one for choice in choices for one in choice.get("rounds", [])]


def test_rounds_add_up_to_the_text_and_to_the_engines_counts(server):
    message = {"messages": [{"role": "user", "content": "abab"}]}
    for path, body in (COMPLETIONS, {"prompt": "abab"}), (CHAT, message):
        before = server.llm.metrics()
        whole = server.post(path, body | ASKED).json
        after = server.llm.metrics()
        (choice,) = whole["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        rounds = choice["rounds"]
        tokens = [token for one in rounds for token in one["tokens"]]
        assert "".join(tokens).replace("</s>", "") == text and len(tokens) == 60
        drafted = [one for one in rounds if one["num_drafts"]]
        assert len(drafted) == after.num_drafts - before.num_drafts > 0
        counted = after.num_draft_tokens - before.num_draft_tokens
        assert sum(one["num_drafts"] for one in drafted) == counted
        accepted = sum(len(one["tokens"]) - 1 for one in rounds)
        assert accepted == after.num_accepted_tokens - before.num_accepted_tokens > 0
        streamed = server.post(path, body | ASKED | {"stream": True}).events
        assert rounds_of(streamed) == rounds  # in one event per step, or merged
        plain = server.post(path, body | ASKED | {"return_rounds": False}).json
        assert "rounds" not in plain["choices"][0]


class Elements(HTMLParser):
    """The texts of scripts and styles in a page, and the names of all attributes."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.attributes, self._inside = {}, {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        self.attributes |= attrs

    def handle_data(self, data):
        if self._inside in ("script", "style"):
            assert self._inside not in self.texts
            self.texts[self._inside] = data
        self._inside = None


def test_the_policy_allows_the_pages_own_script_and_no_other_host(simulated):
    with served(simulated, api_key=("k",)) as keyed:
        answer = keyed.get("/")  # it asks for the key
        assert keyed.get("/v1/models").status == 401
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    page = answer.body.decode()
    parts = answer.headers["content-security-policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    found = Elements(page)
    for element, text in found.texts.items():
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert not re.search(r"https?:|//\w", page) and len(found.texts) == 2
    assert not [name for name in found.attributes if name == "style" or name.startswith("on")]


@pytest.mark.skipif(not (CHROMIUM and find_spec("playwright")), reason="there is no browser")
def test_a_browser_shows_drafts_as_they_come(simulated):
    from playwright.sync_api import expect, sync_playwright

    with served(simulated, api_key=("k",)) as keyed, sync_playwright() as playwright:
        body = {"messages": [{"role": "user", "content": "abab"}]} | ASKED
        body |= {"ignore_eos": False, "max_tokens": 100}
        rounds = keyed.post(CHAT, body, authorization="Bearer k").json["choices"][0]["rounds"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme="dark")
        wrong, asked = [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(urlsplit(request.url).netloc))
        page.goto(keyed.url)
        page.fill("#question", "abab")
        page.fill("#tokens", "100")
        page.press("#question", "Enter")
        expect(page.locator(".error")).to_contain_text("key is missing or wrong")
        expect(page.locator("#question")).to_have_value("abab")  # nothing typed is lost
        page.fill("#key", "k")
        page.click("#send")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.locator(".numbers").last).to_contain_text(f"in {len(rounds) - 1} steps")
        expect(page.locator("#send")).to_be_enabled()
        last = page.locator("article").last
        assert last.locator(".draft").all_text_contents() == [
            token for one in rounds for token in one["tokens"][:-1]
        ]
        assert last.locator(".target").count() == len(rounds)
        drafted = sum(one["num_drafts"] for one in rounds)
        expect(last.locator(".numbers")).to_contain_text(f"of {drafted} drafts accepted")
        page.click("#clear")
        page.fill("#tokens", "")
        page.uncheck("#drafts")
        page.fill("#question", "c")
        page.click("#send")
        expect(page.locator(".numbers").last).to_contain_text("1.00 tokens per step")
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width == 360 and set(asked) == {urlsplit(keyed.url).netloc}
        assert not wrong, "a script failed"
        browser.close()
