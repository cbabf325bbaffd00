from distloop.diagnostics.findings import Audit, Finding


def test_an_audit_prints_a_line_for_each_kind_of_finding_and_for_what_was_not_checked():
    findings = [Finding("no gradient", f"net/kernel{i}", "use it in the loss") for i in range(52)]
    other = Finding("no gradient", "net/bias", "leave it out")
    assert str(Audit((*findings, other), ("the rest",))).splitlines() == [
        "no gradient: net/kernel0, net/kernel1, net/kernel2 and 49 more: use it in the loss.",
        "no gradient: net/bias: leave it out.",
        "not checked: the rest.",
    ]
    assert str(findings[0]) == "no gradient: net/kernel0: use it in the loss."
    assert str(Audit(())) == "nothing found."
