from distloop.diagnostics.findings import Audit, Finding


def test_an_audit_prints_a_line_for_each_finding_and_for_what_was_not_checked():
    finding = Finding("no gradient", "net/kernel", "use it in the loss")
    assert str(Audit((finding, finding), ("the rest",))).splitlines() == [
        "no gradient: net/kernel: use it in the loss.",
        "no gradient: net/kernel: use it in the loss.",
        "not checked: the rest.",
    ]
    assert str(Audit(())) == "nothing found."
