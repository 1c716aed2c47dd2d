"""Small journals made of records, for tests of what can be wrong with them."""

from sluice.telemetry import records
from sluice.telemetry.journal_file import JournalFile

S = 1_000_000_000


def request(number, at_s, ttft_s=0.1, name=None, **facts):
    """The records of one request that was answered."""
    at_ns, ttft_ns = int(at_s * S), int(ttft_s * S)
    name = name or f"r{number}"
    tenant = facts.get("tenant", "")
    end_ns = at_ns + ttft_ns + S // 2
    return [
        records.RequestArrived(at_ns, name, "chat", at_ns, 100, 64, tenant=tenant),
        records.RequestDispatched(at_ns, name, "chat-0", 1),
        records.FirstToken(at_ns + ttft_ns, name, ttft_ns),
        records.RequestEnded(
            end_ns,
            name,
            "chat",
            "stop",
            at_ns,
            "chat-0",
            1,
            100,
            0,
            20,
            queue_ns=ttft_ns // 2,
            prefill_ns=ttft_ns - ttft_ns // 2,
            decode_ns=S // 2,
            ttft_ns=ttft_ns,
            tpot_ns=S // 40,
        ),
    ]


def refused(number, at_s):
    """The records of one request that was refused."""
    at_ns = int(at_s * S)
    return [
        records.RequestArrived(at_ns, f"r{number}", "chat", at_ns, 100, 64),
        records.RequestRejected(at_ns, f"r{number}", "chat", 429, "queue_full", 9.0, 8.0),
    ]


def written(folder, found):
    """A journal folder with these records, in order of time."""
    journal = JournalFile(folder, "test")
    for record in sorted(found, key=lambda each: each.t_ns):
        journal.append(record)
    journal.close()
    return folder
