import pytest

from areal_hpc.reward.answers import extract


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1+1=2\n#### 2", "2"),
        ("#### 1\n#### 2 \nmore", "2"),
        ("####-7", "-7"),
        ("a #### b #### c d\r\n", "c d"),
        ("##### 5", "5"),
        ("no marker: 5", None),
        ("### 5", None),
        ("", None),
        ("####", None),
        ("#### \n5", None),
        ("#### 5\n####", None),
    ],
)
def test_extract(text, answer):
    assert extract(text) == answer
