"""What a folder's tokenizer files are, and what to do where they are not what is read here."""

from support.refusals import refusal

from specjax.text.tokenizer import load_tokenizer


def test_a_folder_with_only_a_sentencepiece_model(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    text = refusal(lambda: load_tokenizer(tmp_path), tmp_path, "tokenizer.model", "save_pretrained")
    assert "\n" not in text
    (tmp_path / "tokenizer.json").write_text("{}")
    refusal(lambda: load_tokenizer(tmp_path), "tokenizer.json is not a tokenizer")
